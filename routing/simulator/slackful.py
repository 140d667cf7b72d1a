"""An engine's scheduling rule as the workers have it: `routing.schedule` asked with what a simulated engine knows."""

from __future__ import annotations

from functools import lru_cache

from routing.schedule import TARGETS, Limits, PrefillCost, Targets, Waiting, order, prefill_tokens
from routing.simulator.engine import Engine, Plan
from routing.simulator.sequence import UNKNOWN, Sequence
from routing.simulator.timing import CHUNK_TOKENS, LINEAR_MS, SQUARE_MS, STEP_MS, Timing

LEAST_TOKENS = 6_144
"""Three quarters of a step: the good requests of the Mooncake trace are most from 4,096 to 8,192 on, and fewer below"""


def slack_aware(engine: Engine, targets: Targets = TARGETS) -> Plan:
    """Decode first, prompts as far as the decoding sequences' slack allows, the most urgent first."""
    now_ms, cost = engine.ends_ms, cost_of(engine.timing)
    limits = Limits(step_tokens=CHUNK_TOKENS - len(engine.running), least_tokens=LEAST_TOKENS)
    backlog = engine.backlog()
    waiting = [
        Waiting(tokens=_left(sequence), due_in_ms=sequence.arrival.at_ms + targets.ttft_ms - now_ms)
        for sequence in backlog
    ]
    turns = order(waiting, cost, limits.step_tokens)
    tokens = prefill_tokens(
        decode_ms=engine.timing.decode_ms(engine.kv_tokens) if engine.running else 0.0,
        slacks_ms=engine.slacks_ms(now_ms, targets.tbt_ms),
        waiting=[waiting[turn] for turn in turns],
        cost=cost,
        limits=limits,
        targets=targets,
    )
    return tokens, [backlog[turn] for turn in turns]


@lru_cache(maxsize=64)
def cost_of(timing: Timing) -> PrefillCost:
    """What the engine has measured its prefill to cost."""
    speed = timing.prefill_speed
    return PrefillCost(fixed_ms=STEP_MS / speed, token_ms=LINEAR_MS / speed, square_ms=SQUARE_MS / speed)


def _left(sequence: Sequence) -> int:
    return sequence.expected_tokens if sequence.started_ms == UNKNOWN else sequence.left_tokens
