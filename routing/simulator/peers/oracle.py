"""What could be had by knowing more than anybody can: a bound, not a peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random

from routing.schedule import TARGETS
from routing.simulator.engine import Engine
from routing.simulator.policy import View
from routing.simulator.timing import CHUNK_TOKENS, COLD
from routing.simulator.trace import Arrival


class Oracle:
    """The least loss to this request and to those that decode, knowing how many tokens each of them has left.

    The same sum as `routing.loss`, with nothing to estimate: engines as they are, the lengths of answers known.
    """

    PREFILL_PRICE, DECODE_PRICE = 2.0, 0.75
    TTFT_DOUBT_MS, PACE_DOUBT_MS = 90.0, 300.0
    """What is still to come isn't known to it: a burst's later prompts, the next prompts at the same engine"""

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        losses = [self._loss(arrival, now_ms, engine) for engine in engines if isinstance(engine, Engine)]
        lowest = min(losses)
        return self._draw.choice([index for index, loss in enumerate(losses) if loss == lowest])

    def _loss(self, arrival: Arrival, now_ms: float, engine: Engine) -> float:
        timing, tbt_ms = engine.timing, TARGETS.tbt_ms
        new_tokens = arrival.prompt_tokens - engine.cached_tokens(arrival.prefix)
        prompt_ms, backlog_ms = timing.chunked_ms(new_tokens), timing.chunked_ms(engine.backlog_tokens)
        backlog = engine.backlog()
        will = engine.kv_tokens + sum(one.arrival.prompt_tokens for one in backlog)
        before_ms = timing.decode_ms(will)
        after_ms = timing.decode_ms(will + arrival.prompt_tokens + arrival.output_tokens / 2)
        steps = (1.5 + new_tokens // CHUNK_TOKENS) * bool(engine.running)
        ttft_ms = now_ms - arrival.at_ms + backlog_ms + prompt_ms + steps * before_ms
        loss = _chance((ttft_ms - TARGETS.ttft_ms) / self.TTFT_DOUBT_MS)
        loss += _chance((after_ms - tbt_ms) * arrival.output_tokens / self.PACE_DOUBT_MS)
        loss += self.PREFILL_PRICE * prompt_ms / TARGETS.ttft_ms + self.DECODE_PRICE * after_ms / tbt_ms
        kept = [
            (slack_ms - backlog_ms, one.finish_at - engine.steps)
            for slack_ms, one in zip(engine.slacks_ms(now_ms), engine.running, strict=True)
        ]
        kept += [(-backlog_ms / 2, one.arrival.output_tokens) for one in backlog]
        for slack_ms, left in kept:
            without = slack_ms + left * (tbt_ms - before_ms)
            loss += _chance((prompt_ms + left * (after_ms - before_ms) - without) / self.PACE_DOUBT_MS)
            loss -= _chance(-without / self.PACE_DOUBT_MS)
        return loss


def _chance(deviations: float) -> float:
    """Logistic: 0.5 at none."""
    return 1 / (1 + math.exp(-min(max(deviations, -30.0), 30.0)))


def bound(arrivals: Iterable[Arrival], ttft_ms: float = TARGETS.ttft_ms) -> tuple[float, float]:
    """(goodput, hit) that no router can exceed: each prompt alone on an engine that holds all that was ever seen."""
    seen: set[int] = set()
    good = requests = cached = prompts = 0
    for one in arrivals:
        held = 0
        for piece in one.prefix:
            if piece not in seen:
                break
            held += 512
        held = min(held, one.prompt_tokens - 1)
        seen.update(one.prefix)
        requests += 1
        good += COLD.chunked_ms(one.prompt_tokens - held) <= ttft_ms
        cached += held
        prompts += one.prompt_tokens
    return good / max(requests, 1), cached / max(prompts, 1)
