"""Per-key and per-model limits, counted in this process: simple, and right as long as one ingress serves a key."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingress.errors import ApiError
from wire.messages import Limits

MINUTE_MS = 60_000
FORGET_AFTER_MS = 10 * MINUTE_MS


@dataclass(slots=True)
class Bucket:
    """Refills by `per_minute` a minute up to as much. May go below zero: what was used can't be refused any more."""

    per_minute: int
    level: float
    at_ms: float

    def wait_ms(self, now_ms: float, least: float) -> float:
        """How long until the level is at least `least`; 0 = now."""
        rate = self.per_minute / MINUTE_MS
        self.level = min(self.level + (now_ms - self.at_ms) * rate, float(self.per_minute))
        self.at_ms = now_ms
        return max(least - self.level, 0.0) / rate if rate else math.inf


@dataclass(slots=True)
class _Use:
    """What one key or model has used."""

    open: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None
    seen_ms: float = 0.0


class Permit:
    """One admitted call, until it is released."""

    def __init__(self, uses: list[_Use]) -> None:
        self._uses = uses
        for use in uses:
            use.open += 1

    def release(self, tokens: int) -> None:
        """The call is over and used so many tokens. Once."""
        for use in self._uses:
            use.open -= 1
            if use.tokens is not None:
                use.tokens.level -= tokens
        self._uses = []


class Limiter:
    """Admits calls. Tokens are known only afterwards: a call is refused while earlier ones overdrew their minute."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    def admit(self, who: dict[str, Limits], now_ms: float) -> Permit:
        """A permit under all of these limits; ApiError 429 that names the first that is exceeded.

        `who`: a name for the user, such as a key id → its limits.
        """
        uses = [self._use(name, limits, now_ms) for name, limits in who.items()]
        for use, limits in zip(uses, who.values(), strict=True):
            _check(use, limits, now_ms)
        for use in uses:
            if use.requests is not None:
                use.requests.level -= 1
        return Permit(uses)

    def forget_idle(self, now_ms: float) -> None:
        """Drop what has not been used for long and is full again."""
        idle = [n for n, use in self._uses.items() if not use.open and now_ms - use.seen_ms > FORGET_AFTER_MS]
        for name in idle:
            del self._uses[name]

    def _use(self, name: str, limits: Limits, now_ms: float) -> _Use:
        use = self._uses.setdefault(name, _Use())
        use.seen_ms = now_ms
        use.requests = _bucket(use.requests, limits.requests_per_minute, now_ms)
        use.tokens = _bucket(use.tokens, limits.tokens_per_minute, now_ms)
        return use


def _bucket(old: Bucket | None, per_minute: int | None, now_ms: float) -> Bucket | None:
    if per_minute is None:
        return None
    if old is not None and old.per_minute == per_minute:
        return old
    return Bucket(per_minute, float(per_minute), now_ms)


def _check(use: _Use, limits: Limits, now_ms: float) -> None:
    if limits.concurrent is not None and use.open >= limits.concurrent:
        raise _exceeded("concurrent requests", limits.concurrent, 1_000, "concurrency_limit_exceeded")
    if use.requests is not None and (wait_ms := use.requests.wait_ms(now_ms, 1)) > 0:
        raise _exceeded("requests per minute", use.requests.per_minute, wait_ms, "rate_limit_exceeded")
    if use.tokens is not None and (wait_ms := use.tokens.wait_ms(now_ms, 1)) > 0:
        raise _exceeded("tokens per minute", use.tokens.per_minute, wait_ms, "rate_limit_exceeded")


def _exceeded(what: str, limit: int, wait_ms: float, code: str) -> ApiError:
    seconds = MINUTE_MS // 1_000 if math.isinf(wait_ms) else max(1, math.ceil(wait_ms / 1_000))
    return ApiError(
        429, f"Limit of {limit} {what} reached; try again in {seconds} s.", code=code, retry_after_s=seconds
    )
