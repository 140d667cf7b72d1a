"""Trust in an engine: lost by failures, regained by time.

A penalty p multiplies an engine's weight by 2^−p. It is never zero, so the last engine is never ejected: among one,
whatever its penalty, it gets everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["answered", "client_error", "overloaded", "timed_out", "failed"]
"""client_error is a 4xx but 429: the client's fault, not the engine's. overloaded is 429 or 503"""

HALF_LIFE_MS = 5_000.0
"""A penalty is half as much this long after the last failure"""
MAX_PENALTY = 5.0
"""A thirty-second of the traffic still comes: that is how recovery is noticed"""

_BLAME: dict[Outcome, float] = {
    "answered": 0.0,
    "client_error": 0.0,
    "overloaded": 0.5,
    "timed_out": 1.0,
    "failed": 1.0,
}


@dataclass(frozen=True, slots=True)
class Penalty:
    """How little an engine is trusted, as of a time."""

    value: float = 0.0
    at_ms: float = 0


def penalty_at(penalty: Penalty, now_ms: float) -> float:
    """What is left of it now. A clock that went back decays nothing."""
    age_ms = max(now_ms - penalty.at_ms, 0)
    return float(penalty.value * 2.0 ** (-age_ms / HALF_LIFE_MS))


def punish(penalty: Penalty, outcome: Outcome, now_ms: float) -> Penalty:
    """The penalty after an outcome: each failure halves the weight, until MAX_PENALTY."""
    return grown(penalty, _BLAME[outcome], now_ms)


def grown(penalty: Penalty, blame: float, now_ms: float) -> Penalty:
    """The penalty after `blame` (0 to 1): the share of failures among what just ended. Never younger than it was."""
    value = min(penalty_at(penalty, now_ms) + min(max(blame, 0.0), 1.0), MAX_PENALTY)
    return Penalty(value, max(now_ms, penalty.at_ms))


def weight_factor(penalty: float) -> float:
    """What a penalty leaves of a weight: in (0, 1]."""
    return float(2.0**-penalty)
