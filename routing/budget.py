"""One budget for everything that sends a request a second time: retries, hedges, spill to another region.

Retries answer failures, but failures caused by load are made worse by them. The budget bounds retries to a share of
the first attempts of the recent past, so that load is amplified by 1 + `ratio` at most. Time is passed in.
"""

from __future__ import annotations

import math

HORIZON_MS = 10_000.0
"""The recent past: unspent budget is worth this much traffic at most"""


RATIO = 0.1
"""Retries per first attempt while there is room: load is amplified by a tenth at most"""


def ratio_at(latency_ms: float | None, request_ms: float | None, *, refusing: bool) -> float:
    """The ratio that a snapshot's prices allow: RATIO while half of the capacity is free, then ever less.

    `latency_ms` ÷ `request_ms`, what a request takes by what one more costs in all, is the share of capacity that is
    free, where latency is 1 ÷ (1 − load) and so one more costs 1 ÷ (1 − load)². While requests are refused a retry
    takes another's place: then there are none but the reserve.
    """
    if refusing:
        return 0.0
    if not latency_ms or not request_ms or not 0 < latency_ms <= request_ms < math.inf:
        return RATIO
    return RATIO * min(1.0, 2 * latency_ms / request_ms)


class RetryBudget:
    """A token bucket filled by first attempts. Its cap moves with the traffic, so that no calm hour saves up a storm.

    `ratio`: retries per first attempt. `reserve`: retries that are there even without traffic, refilled once a
    HORIZON_MS: one lone request must be able to try again.
    """

    def __init__(self, *, ratio: float = RATIO, reserve: float = 3.0, now_ms: float = 0.0) -> None:
        self._ratio = _share(ratio)
        self._reserve = reserve
        self._recent = 0.0
        self._tokens = reserve
        self._at_ms = now_ms

    @property
    def ratio(self) -> float:
        return self._ratio

    def tighten(self, ratio: float) -> None:
        """Another ratio from now on, as when the optimum's shadow price rises. ValueError unless from 0 to 1."""
        self._ratio = _share(ratio)

    def cap(self, now_ms: float) -> float:
        """The most that could be unspent now."""
        self._pass_time(now_ms)
        return self._reserve + self._ratio * self._recent

    def first_attempt(self, now_ms: float) -> None:
        """A request was sent for the first time."""
        self._pass_time(now_ms)
        self._recent += 1
        self._tokens = min(self._tokens + self._ratio, self._reserve + self._ratio * self._recent)

    def try_retry(self, now_ms: float) -> bool:
        """Spend one retry, if there is one."""
        self._pass_time(now_ms)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _pass_time(self, now_ms: float) -> None:
        passed_ms = now_ms - self._at_ms
        if passed_ms <= 0:
            return  # a clock that went back changes nothing
        self._at_ms = now_ms
        self._recent *= math.exp(-passed_ms / HORIZON_MS)
        refilled = self._tokens + self._reserve * passed_ms / HORIZON_MS
        if self._tokens < self._reserve:
            self._tokens = min(refilled, self._reserve)
        self._tokens = min(self._tokens, self._reserve + self._ratio * self._recent)


def _share(ratio: float) -> float:
    if not 0 <= ratio <= 1:
        raise ValueError(f"a retry ratio is from 0 to 1, not {ratio}")
    return ratio
