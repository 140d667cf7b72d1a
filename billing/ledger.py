"""What billing asks of the ledger. `billing.store` (ClickHouse) and `billing.fake` (memory) pass one contract suite."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from billing.charge import Line
from billing.prices import Price
from wire.fleet import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """What was used and is owed for a model and tier on a day. Tokens are those of billed requests."""

    day: str
    """YYYY-MM-DD, in the time zone that was asked for"""
    model: str
    tier: str
    requests: int
    billed_requests: int
    unpriced_requests: int
    """billed ones for which the price book had no price: they count with 0"""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    amount_nanodollars: int


class Ledger(Protocol):
    """Every call may raise LedgerAway, and may then be made again."""

    def insert(self, lines: Sequence[Line]) -> None:
        """Record attempts, durable when this returns. Recording one again changes nothing."""
        ...

    def lines(self, requests: Collection[tuple[str, str]]) -> Mapping[str, Line]:
        """The ledger's lines, by request id, of some (tenant, request id): the highest attempt of each."""
        ...

    def totals(self, tenant: str, from_ms: int, to_ms: int, tz: str) -> Sequence[Total]:
        """By day of `tz`, model and tier, in that order, of the requests created in [from_ms, to_ms)."""
        ...

    def tenants(self, from_ms: int, to_ms: int) -> Sequence[str]:
        """Who has a request created in [from_ms, to_ms), in order."""
        ...

    def attempts_between(
        self, fleet: Fleet, shard: int, from_offset: int, to_offset: int, at_most: int
    ) -> Sequence[Line]:
        """Attempts whose Finish lies in [from_offset, to_offset) of a journal partition, in that order."""
        ...

    def adopted_prices(self) -> Sequence[Price]:
        """Every price that was adopted and not withdrawn."""
        ...

    def adopt(self, prices: Sequence[Price], now_ms: int) -> None:
        """Record prices as adopted."""
        ...

    def withdraw(self, prices: Sequence[Price], now_ms: int) -> None:
        """Record that prices left the book before they began."""
        ...

    def attempts_since(self, model: str, tier: str, since_ms: int) -> int:
        """How many attempts were created since then, of a model and tier; "*" is any."""
        ...
