"""A ledger in memory that answers as the real one does: the same contract suite holds both."""

from __future__ import annotations

import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from zoneinfo import ZoneInfo

from billing.charge import Line
from billing.errors import LedgerAway
from billing.ledger import Total
from billing.prices import ANY, UNPRICED, Price
from wire.fleet import Fleet


class FakeLedger:
    """`away` True makes every call fail, as a database that can't be reached."""

    def __init__(self) -> None:
        self.away = False
        self._attempts: dict[tuple[str, str, int], Line] = {}
        self._prices: dict[str, Price] = {}

    def insert(self, lines: Sequence[Line]) -> None:
        self._reach()
        for line in lines:
            usage = line.usage
            self._attempts[usage.tenant, usage.request_id, usage.attempt] = line

    def lines(self, requests: Collection[tuple[str, str]]) -> Mapping[str, Line]:
        self._reach()
        asked = set(requests)
        return {key[1]: line for key, line in self._winners().items() if key in asked}

    def totals(self, tenant: str, from_ms: int, to_ms: int, tz: str) -> Sequence[Total]:
        self._reach()
        groups: dict[tuple[str, str, str], list[Line]] = defaultdict(list)
        for (owner, _), line in self._winners().items():
            usage = line.usage
            if owner == tenant and from_ms <= usage.created_ms < to_ms:
                groups[_day(usage.created_ms, tz), usage.model, usage.tier].append(line)
        return tuple(_total(*key, lines) for key, lines in sorted(groups.items()))

    def tenants(self, from_ms: int, to_ms: int) -> Sequence[str]:
        self._reach()
        return sorted({k[0] for k, line in self._attempts.items() if from_ms <= line.usage.created_ms < to_ms})

    def attempts_between(
        self, fleet: Fleet, shard: int, from_offset: int, to_offset: int, at_most: int
    ) -> Sequence[Line]:
        self._reach()
        found = [
            line
            for line in self._attempts.values()
            if (line.usage.fleet, line.usage.shard) == (fleet, shard)
            and from_offset <= line.usage.finish_offset < to_offset
        ]
        found.sort(key=lambda line: (line.usage.finish_offset, line.usage.request_id, line.usage.attempt))
        return found[:at_most]

    def adopted_prices(self) -> Sequence[Price]:
        self._reach()
        return sorted(self._prices.values(), key=lambda p: (p.effective_from_ms, p.price_id))

    def adopt(self, prices: Sequence[Price], now_ms: int) -> None:
        self._reach()
        self._prices.update({price.price_id: price for price in prices})

    def withdraw(self, prices: Sequence[Price], now_ms: int) -> None:
        self._reach()
        for price in prices:
            self._prices.pop(price.price_id, None)

    def attempts_since(self, model: str, tier: str, since_ms: int) -> int:
        self._reach()
        return sum(
            model in (line.usage.model, ANY) and tier in (line.usage.tier, ANY) and line.usage.created_ms >= since_ms
            for line in self._attempts.values()
        )

    def _winners(self) -> dict[tuple[str, str], Line]:
        return {key[:2]: line for key, line in sorted(self._attempts.items(), key=lambda item: item[0])}

    def _reach(self) -> None:
        if self.away:
            raise LedgerAway("the ledger is away")


def _day(ms: int, tz: str) -> str:
    return dt.datetime.fromtimestamp(ms / 1000, ZoneInfo(tz)).date().isoformat()


def _total(day: str, model: str, tier: str, lines: Iterable[Line]) -> Total:
    every = list(lines)
    billed = [line for line in every if line.billable]
    return Total(
        day=day,
        model=model,
        tier=tier,
        requests=len(every),
        billed_requests=len(billed),
        unpriced_requests=sum(line.price_id == UNPRICED for line in billed),
        prompt_tokens=sum(line.usage.prompt_tokens for line in billed),
        cached_tokens=sum(line.usage.cached_tokens for line in billed),
        completion_tokens=sum(line.usage.completion_tokens for line in billed),
        amount_nanodollars=sum(line.amount_nanodollars for line in every),
    )
