"""A tenant's bill for a month: read from the ledger, added up in integers, shown in exact decimals."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from billing.errors import BadStatement
from billing.ledger import Ledger, Total

_MONTH = re.compile(r"([0-9]{4})-([0-9]{2})\Z")
_COUNTS = tuple(f.name for f in fields(Total) if f.type == "int")
_NANODOLLARS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What a tenant owes for the requests created in a month of a time zone."""

    tenant: str
    month: str
    """YYYY-MM"""
    tz: str
    currency: str
    days: tuple[Total, ...]
    """by day, model and tier"""

    @property
    def models(self) -> tuple[Total, ...]:
        """By model and tier, over all days; their `day` is empty."""
        keys = sorted({(row.model, row.tier) for row in self.days})
        return tuple(
            _sum((row for row in self.days if (row.model, row.tier) == key), model=key[0], tier=key[1]) for key in keys
        )

    @property
    def total(self) -> Total:
        return _sum(self.days)


def statement(ledger: Ledger, tenant: str, month: str, tz: str = "UTC") -> Statement:
    """The bill of `tenant` for `month` ("YYYY-MM"), its days those of `tz`. BadStatement, LedgerAway."""
    from_ms, to_ms = month_span_ms(month, tz)
    days = tuple(ledger.totals(tenant, from_ms, to_ms, tz))
    return Statement(tenant=tenant, month=month, tz=tz, currency="USD", days=days)


def month_span_ms(month: str, tz: str) -> tuple[int, int]:
    """[first, next month's first) millisecond of a month in a time zone. BadStatement when one of them isn't one."""
    match = _MONTH.match(month)
    if match is None or not 1 <= int(match[2]) <= 12 or not 1970 <= int(match[1]) < 2100:
        raise BadStatement(f"{month!r} isn't a month; write it like 2026-01")
    try:
        zone = ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise BadStatement(f"{tz!r} isn't a time zone; write one like UTC or Asia/Kolkata") from exc
    year, number = int(match[1]), int(match[2])
    first = dt.datetime(year, number, 1, tzinfo=zone)
    after = dt.datetime(year + number // 12, number % 12 + 1, 1, tzinfo=zone)
    return _epoch_ms(first), _epoch_ms(after)


def dollars(nanodollars: int) -> str:
    """The exact amount, with its nine decimals."""
    whole, rest = divmod(abs(nanodollars), _NANODOLLARS)
    return f"{'-' if nanodollars < 0 else ''}{whole}.{rest:09}"


def as_json(bill: Statement) -> dict[str, Any]:
    """The statement as JSON values: amounts as integers of nano-dollars and as exact text."""
    return {
        "tenant": bill.tenant,
        "month": bill.month,
        "tz": bill.tz,
        "currency": bill.currency,
        "total": _json_row(bill.total, without=("day", "model", "tier")),
        "models": [_json_row(row, without=("day",)) for row in bill.models],
        "days": [_json_row(row) for row in bill.days],
    }


def as_text(bill: Statement) -> str:
    """The statement as a table for people."""
    heads = ("day", "model", "tier", "requests", "billed", "prompt", "cached", "completion", bill.currency)
    rows = [_cells(row) for row in bill.days]
    rows += [_cells(row, day="all days") for row in bill.models]
    rows.append(_cells(bill.total, day="total"))
    widths = [max(len(line[i]) for line in [heads, *rows]) for i in range(len(heads))]
    lines = [f"{bill.tenant}, {bill.month} ({bill.tz})", "", _aligned(heads, widths)]
    lines += [_aligned(row, widths) for row in rows]
    if bill.total.unpriced_requests:
        lines += ["", f"Warning: the price book had no price for {bill.total.unpriced_requests} of these requests."]
        lines += ["They count with 0. Add a price for their model: MILLSTREAM_PRICE_BOOK, docs/billing.md."]
    return "\n".join(lines) + "\n"


def _sum(rows: Iterable[Total], model: str = "", tier: str = "") -> Total:
    every = list(rows)
    sums = {name: sum(getattr(row, name) for row in every) for name in _COUNTS}
    return Total(day="", model=model, tier=tier, **sums)


def _json_row(row: Total, without: Sequence[str] = ()) -> dict[str, Any]:
    values = {f.name: getattr(row, f.name) for f in fields(row) if f.name not in without}
    return values | {"amount": dollars(row.amount_nanodollars)}


def _cells(row: Total, day: str | None = None) -> tuple[str, ...]:
    shown = replace(row, day=row.day if day is None else day)
    counts = (
        *(shown.requests, shown.billed_requests),
        *(shown.prompt_tokens, shown.cached_tokens, shown.completion_tokens),
    )
    return (shown.day, shown.model, shown.tier, *map(str, counts), dollars(shown.amount_nanodollars))


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    words = [c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(words).rstrip()


def _epoch_ms(moment: dt.datetime) -> int:
    return int(moment.timestamp()) * 1000
