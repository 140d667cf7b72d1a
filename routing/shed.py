"""How much of a model's traffic to refuse: by what its engines show, never by what a profile expects of them.

A profile that is wrong by a factor of two would refuse people whom an idle engine could serve, or nobody while
everything starves; a queue can't be wrong. What the engines end a second is their capacity, once requests wait. With
that rate μ and an expected wait of W, admitting μ · patience ÷ W a second settles where W is the patience: half of it
admits twice what ends, and twice of it half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from routing.policy import Choice
from routing.profile import Profile, rate
from wire.messages import EngineSignal

PATIENCE_MS = 300_000.0
"""How long a request may be expected to wait for its first token before it is refused, unless the operator says
otherwise: half of the time that a request has in all. With targets to keep, twice that of the first token is right"""
PROMISED_LOSS = 3.0
"""In requests: with targets to keep, what is right for `Gate`'s `most_loss`. A request's own loss is 1 at most, and the
rest is what it takes from others and the price of the engine's time: serving it breaks more promises than it keeps.
From 1.5 to 3 it keeps as many at 4 and 5 times the Mooncake trace's speed; the more, the fewer are refused"""
CROWD = 4
"""Requests that wait at an engine, on average, before anybody is refused: fewer are no overload, however long it is"""
MOST = 0.95
"""Some are always admitted: only by them the engines show that they have room again"""
BUSY = 0.1
"""Of the engines' time: where as much of it has work that waits, it is worth what `routing.loss` says of it, and a long
prompt that comes in a moment when one of them is idle takes it from others, too. On the Mooncake trace it is 0 as it
stands, 0.1 at 4 times its speed, 0.27 at 5 times"""
FULL = 0.2
"""Of the engines' time, too: below it a loss counts in proportion, since time that nobody else would use has no price.
From 0.15 to 0.2 every measured load keeps its promises; at 0.3 too few are refused at 5 times the trace's speed,
and without this 230 of 12,000 are where most of them could have been served"""
LATELY_MS = 10_000.0
"""Over about so long that is averaged. By time and not by requests: of a burst that comes to idle engines all but the
first find them busy, and that is no overload"""
STEP = 0.05
"""By how much of a lost request one decision moves the line: some dozens of requests reach another one"""
LOWER = 0.5
"""Of what others may wait, and lose, what is left to each priority below 0: it is refused while they still find room,
and where refusing it is enough their waits never reach what they may be"""
LEAST_LINE, MOST_LINE = -STEP, 4.0
"""A request without any expected loss is refused last, but can be; no loss that matters is larger than the other"""


class Gate:
    """Whom an ingress refuses: of each priority, those that have most to lose, as many as the snapshot says; and who
    would wait for too long at the very engine that is best for all, those of a lower priority sooner.

    A request whose promise is broken wherever it goes costs others theirs, too, so overload is best shed there. What
    is refused must be a share of requests, though, not whatever is above a fixed loss: a slow engine keeps no promise
    and is worth having. So a line follows the quantile: up with each request refused, down with each admitted, by
    steps that balance at that share (Robbins and Monro 1951).
    """

    def __init__(self, patience_ms: float = PATIENCE_MS, most_loss: float = math.inf) -> None:
        """`most_loss`: in requests, the expected loss above which one is refused while engines are busy."""
        self._patience_ms = patience_ms
        self._most_loss = most_loss
        self._busy = 0.0
        self._at_ms: float | None = None
        self._lines: dict[int, float] = {}

    def refuses(self, priority: int, share: float, choice: Choice, now_ms: float) -> bool:
        """Whether to refuse a request that would go there, when this share of its priority is to be refused."""
        passed_ms = 0.0 if self._at_ms is None else max(now_ms - self._at_ms, 0.0)
        self._at_ms = now_ms
        self._busy += (choice.busy - self._busy) * -math.expm1(-passed_ms / LATELY_MS)
        part = LOWER ** max(-priority, 0)
        if choice.wait_ms > self._patience_ms * part or self._breaks_more(choice, self._most_loss * part):
            return True
        if not share > 0:
            self._lines.pop(priority, None)
            return False
        line = self._lines.get(priority, 1.0)
        above = min(choice.loss, MOST_LINE) > line or share >= 1
        moved = line + STEP * ((1 - share) if above else -share)
        self._lines[priority] = min(max(moved, LEAST_LINE), MOST_LINE + STEP)
        return above

    def _breaks_more(self, choice: Choice, most_loss: float) -> bool:
        """Whether to serve it breaks more promises than it keeps."""
        return self._busy > BUSY and choice.loss * min(self._busy / FULL, 1.0) > most_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What one engine shows of its queue."""

    share: float
    """of the region's traffic, that it gets"""
    wait_ms: float
    requests: int
    ended_per_s: float


def waiting(signal: EngineSignal, profile: Profile, share: float) -> Waiting:
    """What an engine says of its queue."""
    return Waiting(
        share=share,
        wait_ms=wait_ms(signal, profile),
        requests=max(signal.queued_requests, 0),
        ended_per_s=profile.load,
    )


def wait_ms(signal: EngineSignal, profile: Profile) -> float:
    """What a request that is sent now waits before its prompt is begun, by what the engine says; 0 if it says nothing.

    Prompts that wait must be computed first. Where every slot is taken each that waits needs an ending, too (Little).
    """
    tokens, requests = max(signal.queued_tokens, 0), max(signal.queued_requests, 0)
    prefill = rate(profile.prefill_tokens_per_s)
    if profile.step is not None:
        pieces = tokens / max(profile.step.piece_tokens, 1)
        prompts_ms = tokens * profile.step.prefill_token_ms + pieces * profile.step.prefill_fixed_ms
    else:
        prompts_ms = tokens * 1_000 / prefill if prefill is not None else 0.0
    if signal.running < signal.slots or not profile.load > 0:
        return prompts_ms
    return max(prompts_ms, requests * 1_000 / profile.load)


def refused(engines: Iterable[Waiting], demand: float, patience_ms: float = PATIENCE_MS) -> float:
    """The share of all requests to refuse. `demand`: requests a second, over all regions that these engines serve, and
    with those that are refused: without them nobody would be refused where the wait is the patience."""
    heard = list(engines)
    crowded = sum(engine.requests for engine in heard) > CROWD * len(heard)
    whole = sum(engine.share for engine in heard)
    if not crowded or whole <= 0 or demand <= 0:
        return 0.0
    expected_ms = sum(engine.share * engine.wait_ms for engine in heard) / whole
    ended = sum(engine.ended_per_s for engine in heard)
    if expected_ms <= patience_ms / 2 or ended <= 0:
        return 0.0
    return min(max(1 - ended * patience_ms / (expected_ms * demand), 0.0), MOST)


def by_priority(part: float, priorities: Mapping[int, float]) -> dict[int, float]:
    """By priority, the share to refuse so that `part` of all is: the lowest priorities first, and no more of one than
    is needed. Without knowledge of priorities, that of 0."""
    asked = {priority: requests for priority, requests in priorities.items() if requests > 0} or {0: 1.0}
    left = min(max(part, 0.0), 1.0) * sum(asked.values())
    found = {}
    for priority in sorted(asked):
        if left <= 0:
            break
        taken = min(left, asked[priority])
        found[priority] = taken / asked[priority]
        left -= taken
    return found
