"""How many prompt tokens an engine's next step computes, by `routing.schedule`: what that needs to know of the time.

It changes when a piece of a prompt is computed, never how: pieces begin at fixed positions whatever runs beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from routing.line import Line
from routing.schedule import TARGETS, Limits, PrefillCost, Targets, Waiting, order, prefill_tokens
from wire.messages import StepCost
from workers.engine.protocol import Key

LEAST_SHARE = 0.75
"""Of a full step: fewer prompt tokens wait, unless they are all there are. From a half on it makes no difference"""
KEEP = 0.98
"""What the steps measured so far count when one more comes: fifty steps ago a third"""
ENOUGH = 8.0
"""Steps of a kind after which their times are believed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt that isn't computed to its end."""

    key: Key
    tokens: int
    """left to be computed"""
    batch: bool


class StepTimes:
    """How long steps take, as a line over what they compute: fitted online, the older a step the less it counts."""

    def __init__(self) -> None:
        self._decode = Line()
        """tokens in the cache → ms of a step without prompts"""
        self._prefill = Line()
        """prompt tokens → ms that they add"""

    def add(self, *, prompt_tokens: int, decodes: bool, held_tokens: int, ms: float) -> None:
        """A step took so long."""
        if not prompt_tokens:
            self._decode = self._decode.fade(KEEP).add(held_tokens, ms)
        else:
            alone_ms = self.decode_ms(held_tokens) if decodes else 0.0
            if alone_ms is not None:
                self._prefill = self._prefill.fade(KEEP).add(prompt_tokens, max(ms - alone_ms, 0.0))

    def decode_ms(self, held_tokens: int) -> float | None:
        """Of a step without prompts; None before enough of them were seen."""
        if self._decode.w < ENOUGH:
            return None
        start, slope = _rising(self._decode)
        return start + slope * held_tokens

    def cost(self, held_tokens: int, piece_tokens: int) -> StepCost | None:
        """What a step costs, as full as the engine is; None before enough was seen."""
        decode_ms = self.decode_ms(held_tokens)
        if decode_ms is None or self._prefill.w < ENOUGH:
            return None
        fixed_ms, token_ms = _rising(self._prefill)
        return StepCost(
            prefill_fixed_ms=fixed_ms,
            prefill_token_ms=token_ms,
            piece_tokens=piece_tokens,
            decode_ms=decode_ms,
            decode_token_ms=_rising(self._decode)[1],
        )


class Pace:
    """Times of the sequences that an engine has: when they came, and how far ahead of their pace their choices are."""

    def __init__(self, step_tokens: int, targets: Targets = TARGETS) -> None:
        """`step_tokens`: prompt tokens that a step computes at most."""
        self.times = StepTimes()
        self._step_tokens = step_tokens
        self._targets = targets
        self._came_ms: dict[Key, float] = {}
        self._began: dict[tuple[Key, int], tuple[float, int]] = {}
        """choice → when it got its first token in this engine, and how many since"""

    def came(self, key: Key, now_ms: float) -> None:
        """A sequence was added."""
        self._came_ms[key] = now_ms

    def drew(self, key: Key, choice: int, now_ms: float) -> None:
        """A choice got a token."""
        first_ms, tokens = self._began.get((key, choice), (now_ms, -1))
        self._began[key, choice] = first_ms, tokens + 1

    def keep(self, running: Iterable[tuple[Key, int]], waiting: Iterable[Key]) -> None:
        """Only these choices run still, and these sequences wait."""
        kept = set(running)
        self._began = {name: known for name, known in self._began.items() if name in kept}
        alive = {key for key, _ in kept} | set(waiting)
        self._came_ms = {key: came_ms for key, came_ms in self._came_ms.items() if key in alive}

    def slacks_ms(self, now_ms: float) -> list[float]:
        """How far ahead of their pace the choices are that have begun."""
        tbt_ms = self._targets.tbt_ms
        return [tbt_ms * tokens - (now_ms - first_ms) for first_ms, tokens in self._began.values()]

    def next_prompts(self, prompts: list[Prompt], held_tokens: int, now_ms: float) -> tuple[int, list[Key]]:
        """How many prompt tokens the next step computes, and whose first. Before times are known, as many as fit.

        Prompts of the batch lane come last, and press nobody.
        """
        step = self.times.cost(held_tokens, self._step_tokens)
        if step is None or not prompts:
            return self._step_tokens, [prompt.key for prompt in prompts]
        cost = PrefillCost(fixed_ms=step.prefill_fixed_ms, token_ms=step.prefill_token_ms)
        waiting = [Waiting(tokens=prompt.tokens, due_in_ms=self._due_in_ms(prompt, now_ms)) for prompt in prompts]
        turns = order(waiting, cost, self._step_tokens)
        tokens = prefill_tokens(
            decode_ms=step.decode_ms,
            slacks_ms=self.slacks_ms(now_ms),
            waiting=[waiting[turn] for turn in turns],
            cost=cost,
            limits=Limits(step_tokens=self._step_tokens, least_tokens=round(LEAST_SHARE * self._step_tokens)),
            targets=self._targets,
        )
        return tokens, [prompts[turn].key for turn in turns]

    def _due_in_ms(self, prompt: Prompt, now_ms: float) -> float:
        if prompt.batch:
            return float("inf")
        return self._came_ms.get(prompt.key, now_ms) + self._targets.ttft_ms - now_ms


def _rising(line: Line) -> tuple[float, float]:
    """Where a line of times begins and how it rises, neither of them negative; level where its points are too alike."""
    mean_x, mean_y = line.x / line.w, line.y / line.w
    if line.xx / line.w - mean_x**2 <= 1e-3 * (mean_x**2 + 1):
        return (mean_y, 0.0) if mean_x == 0 else (0.0, mean_y / mean_x)
    start, slope = line.fit()
    if slope < 0:
        return mean_y, 0.0
    return (start, slope) if start >= 0 else (0.0, mean_y / mean_x)
