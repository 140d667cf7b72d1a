"""What an engine can do, learned from its signals.

An engine reports what it just did, and an idle one does little: only the best of the recent past says what it could
do. Prefill and decode are two capacities, because mixed hardware differs in both and not by the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from wire.messages import EngineSignal

HALF_LIFE_MS = 120_000.0
"""A best rate is forgotten this slowly, so that an engine that became slower is noticed"""
CAUTION = 0.5
"""An engine nobody has measured is taken to be half as fast as the slowest that has been"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Capacities in tokens a second; None until measured."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    at_ms: int = 0


UNMEASURED = Profile()


def learn(profile: Profile, signal: EngineSignal) -> Profile:
    """The profile after one more signal. A rate that is no positive number counts as unknown."""
    fade = 2.0 ** (-max(signal.at_ms - profile.at_ms, 0) / HALF_LIFE_MS)
    return Profile(
        prefill_tokens_per_s=_best(profile.prefill_tokens_per_s, fade, signal.prefill_tokens_per_s),
        decode_tokens_per_s=_best(profile.decode_tokens_per_s, fade, signal.decode_tokens_per_s),
        at_ms=max(signal.at_ms, profile.at_ms),
    )


def relative_speeds(profiles: Iterable[Profile]) -> list[float]:
    """How fast each is next to the others: 1 = as their mean. Unknown is neither zero nor average (CAUTION).

    The geometric mean of prefill and decode; a capacity that nobody knows makes no difference.
    """
    known = list(profiles)
    prefill = _relative([profile.prefill_tokens_per_s for profile in known])
    decode = _relative([profile.decode_tokens_per_s for profile in known])
    return [math.sqrt(p * d) for p, d in zip(prefill, decode, strict=True)]


def rate(value: float | None) -> float | None:
    """A reported rate, or None where it is no positive number."""
    return value if value is not None and 0 < value < math.inf else None


def _best(before: float | None, fade: float, reported: float | None) -> float | None:
    now = rate(reported)
    if before is None or now is None:
        return now if before is None else before * fade
    return max(before * fade, now)


def _relative(rates: list[float | None]) -> list[float]:
    known = [value for value in rates if value is not None]
    if not known:
        return [1.0] * len(rates)
    prior = CAUTION * min(known)
    mean = sum(known) / len(known)
    return [(prior if value is None else value) / mean for value in rates]
