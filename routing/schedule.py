"""What an engine computes in its next step: decode first, and as many prompt tokens as the decoding can bear.

A prompt's tokens hold up every choice that is decoding. A choice bears that as long as it is ahead of its pace: its
slack is the time it has gathered, target · tokens generated − time since its first token. So:

1. every decoding choice gets its next token, always;
2. prompts are computed in the order of their laxity, the time that each could still wait and be in time;
3. a step takes the most prompt tokens that leave no choice behind its pace;
4. where that is little and leaves prompts over, none: each piece pays a step's fixed cost, and waiting a few tokens
   gathers the slack for a large one;
5. where waiting would make a prompt late, or decoding alone is too slow to gather any slack, a full piece.

Fixed small pieces lose more than they save, and so does the shortest prompt first: docs/decisions/marginal-goodput.md.
Pure; the simulator and `workers.engine.scheduler` use the same functions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCost:
    """How long a step takes longer for x prompt tokens: fixed + linear · x + quadratic · x², in ms."""

    fixed_ms: float
    """launching the kernels, and what else a step with a prompt costs whatever its length"""
    token_ms: float
    square_ms: float = 0.0
    """attention over the piece itself"""

    def ms(self, tokens: float) -> float:
        """Of one piece; 0 for none."""
        return self.fixed_ms + (self.token_ms + self.square_ms * tokens) * tokens if tokens > 0 else 0.0

    def tokens(self, ms: float) -> int:
        """The longest piece that takes no longer: the positive root of `ms`; any where tokens cost nothing."""
        over_ms = ms - self.fixed_ms
        if over_ms <= 0:
            return 0
        slope_ms = self.token_ms + math.sqrt(self.token_ms**2 + 4 * self.square_ms * over_ms)
        return math.floor(2 * over_ms / slope_ms) if slope_ms > 0 else sys.maxsize

    def all_ms(self, tokens: float, piece_tokens: int) -> float:
        """Of a prompt, computed in pieces."""
        whole, rest = divmod(tokens, piece_tokens)
        return whole * self.ms(piece_tokens) + self.ms(rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a request is promised. A request meets both, or it is lost."""

    ttft_ms: float = 2_000.0
    """from its arrival to its first token"""
    tbt_ms: float = 25.0
    """between tokens, on average over the request"""


TARGETS = Targets()
PRESSING_MS = 300.0
"""A prompt that could wait this much longer already presses: what joins its step, and its own cost, are estimates"""
STARVED_MS = 10_000.0
"""A prompt that is late by more comes first after all: nobody waits for ever behind those that may still be in time"""
LATE_MS = -100.0
"""A prompt that is late by more can't be saved, so it doesn't press any more"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A prompt that isn't computed yet, or not to its end."""

    tokens: int
    """that must still be computed; what the cache holds is not among them"""
    due_in_ms: float
    """until its first token is late; negative when it is"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step may hold."""

    step_tokens: int
    """prompt tokens at most"""
    least_tokens: int
    """a smaller piece isn't worth a step's fixed cost, unless it is all there is"""


def laxity_ms(waiting: Waiting, cost: PrefillCost, step_tokens: int) -> float:
    """How long a prompt may still wait before it is late."""
    return waiting.due_in_ms - cost.all_ms(waiting.tokens, step_tokens)


def order(waiting: Sequence[Waiting], cost: PrefillCost, step_tokens: int) -> list[int]:
    """Indices in the order in which prompts should be computed: least laxity first, so of a burst the longest. Those
    that are late whatever happens come last, first come first served: they must not make others late too, until they
    would starve."""

    def turn(n: int) -> tuple[int, float]:
        laxity = laxity_ms(waiting[n], cost, step_tokens)
        if laxity >= 0:
            return 1, laxity
        return (0 if waiting[n].due_in_ms < -STARVED_MS else 2), 0.0

    return sorted(range(len(waiting)), key=turn)


def prefill_tokens(
    *,
    decode_ms: float,
    slacks_ms: Iterable[float],
    waiting: Sequence[Waiting],
    cost: PrefillCost,
    limits: Limits,
    targets: Targets = TARGETS,
) -> int:
    """How many prompt tokens the next step computes, over all prompts in the order of `order`.

    `decode_ms`: how long the step takes without any. `slacks_ms`: of the choices that decode, before this step.
    """
    backlog = sum(each.tokens for each in waiting)
    full = min(backlog, limits.step_tokens)
    least_ms = least_slack(slacks_ms)
    gathers = decode_ms < targets.tbt_ms
    if not full or least_ms is None or not gathers or presses(waiting, decode_ms, cost, limits):
        return full
    bearable = min(cost.tokens(least_ms + targets.tbt_ms - decode_ms), full)
    return bearable if bearable in (backlog, full) or bearable >= limits.least_tokens else 0


def least_slack(slacks_ms: Iterable[float]) -> float | None:
    """The smallest slack among those that can be kept; None if there is none. A choice that is behind its pace can't be
    helped by the prompts' waiting for long: it would hold up everybody else's first token."""
    return min((slack for slack in slacks_ms if slack >= 0), default=None)


def presses(waiting: Sequence[Waiting], decode_ms: float, cost: PrefillCost, limits: Limits) -> bool:
    """Whether a prompt that can still be in time would be late if it waited longer, what is before it included."""
    before = 0
    for each in waiting:
        before += each.tokens
        pieces = math.ceil(before / limits.step_tokens)
        laxity = each.due_in_ms - cost.all_ms(before, limits.step_tokens) - pieces * decode_ms
        if each.due_in_ms >= 0 and LATE_MS < laxity < PRESSING_MS:
            return True
    return False
