"""The price book: what a token cost when. Pure but for `load`.

The unit of a price is the pico-dollar per token. A dollar per million tokens is 10⁶ of them, so a price with up to
six decimals ("0.0375") is a whole number, and finer ones are refused rather than rounded.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Any

from billing.errors import PriceBookError

ANY = "*"
UNPRICED = "unpriced"
"""The price id of a line for which the book had no price: its amount is 0 and the bill warns of it"""
_PRICE = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_MAX_REMEMBERED = 4_096
_FIELDS = frozenset({"name", "model", "tier", "effective_from", "input", "cached_input", "output"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One entry of the book; prices in pico-dollars per token."""

    name: str
    model: str
    """public name, or "*" """
    tier: str
    """tier, or "*" """
    effective_from_ms: int
    currency: str
    input_picodollars: int
    cached_input_picodollars: int
    output_picodollars: int

    @property
    def price_id(self) -> str:
        """Its name and a digest of all it says: another content is another price."""
        content = "\n".join(
            (
                *(self.name, self.model, self.tier, str(self.effective_from_ms), self.currency),
                *(str(self.input_picodollars), str(self.cached_input_picodollars), str(self.output_picodollars)),
            )
        )
        return f"{self.name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def covers(self, model: str, tier: str) -> bool:
        return self.model in (model, ANY) and self.tier in (tier, ANY)


class PriceBook:
    """All entries. Looking up is a dictionary's work: books are small and usages many."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self.prices: Sequence[Price] = tuple(sorted(prices, key=_by_time))
        self._latest_first: dict[tuple[str, str], tuple[Price, ...]] = {}

    def price_at(self, model: str, tier: str, created_ms: int) -> Price | None:
        """The price in effect at `created_ms`: the most specific entry that had begun, of those the latest.

        An entry for the model comes before one for "*", then one for the tier before one for "*". None = unpriced.
        """
        key = (model, tier)
        ranked = self._latest_first.get(key)
        if ranked is None:
            if len(self._latest_first) >= _MAX_REMEMBERED:
                self._latest_first.clear()
            ranked = self._latest_first[key] = self._ranked(model, tier)
        return next((price for price in ranked if price.effective_from_ms <= created_ms), None)

    def _ranked(self, model: str, tier: str) -> tuple[Price, ...]:
        covering = [price for price in self.prices if price.covers(model, tier)]
        return tuple(sorted(covering, key=lambda p: (p.model == ANY, p.tier == ANY, -p.effective_from_ms)))


def load(path: Path | None) -> PriceBook:
    """The book in `path`, or the one that ships. PriceBookError when it can't be read or used."""
    if path is None:
        return parse(files("billing").joinpath("price_book.toml").read_text("utf-8"), "the price book that ships")
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise PriceBookError(f"the price book {path} can't be read: {exc}") from exc
    return parse(text, str(path))


def parse(text: str, source: str = "the price book") -> PriceBook:
    """The book in a TOML text. PriceBookError names `source`, the entry, and what would be right."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise PriceBookError(f"{source} isn't TOML: {exc}") from exc
    currency = document.pop("currency", None)
    if currency != "USD":
        raise PriceBookError(f'{source}: currency is {currency!r}; put currency = "USD" at the top')
    entries = document.pop("price", [])
    if document:
        raise PriceBookError(f"{source}: {sorted(document)[0]!r} means nothing here; use currency and [[price]]")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PriceBookError(f"{source}: write each price as a table [[price]]")
    prices = [_price(entry, number, source) for number, entry in enumerate(entries, 1)]
    _refuse_overlaps(prices, source)
    return PriceBook(prices)


def _price(entry: Mapping[str, Any], number: int, source: str) -> Price:
    where = f"{source}, price {number} ({entry.get('name', 'without a name')})"
    missing = _FIELDS - {"tier"} - entry.keys()
    if missing:
        raise PriceBookError(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown := entry.keys() - _FIELDS:
        raise PriceBookError(f"{where}: {sorted(unknown)[0]!r} means nothing here")
    for field in ("name", "model", "tier"):
        value = entry.get(field, ANY)
        if not isinstance(value, str) or not value or (field == "name" and not _NAME.match(value)):
            raise PriceBookError(
                f"{where}: {field} is {value!r}; it must be text, and a name of a-z, 0-9, '.', '-', '_'"
            )
    return Price(
        name=entry["name"],
        model=entry["model"],
        tier=entry.get("tier", ANY),
        effective_from_ms=_instant(entry["effective_from"], where),
        currency="USD",
        input_picodollars=_picodollars(entry["input"], "input", where),
        cached_input_picodollars=_picodollars(entry["cached_input"], "cached_input", where),
        output_picodollars=_picodollars(entry["output"], "output", where),
    )


def _instant(value: object, where: str) -> int:
    if not isinstance(value, dt.datetime) or value.utcoffset() != dt.timedelta(0):
        raise PriceBookError(f"{where}: effective_from is {value}; write a time in UTC like 2026-01-31T00:00:00Z")
    milliseconds, rest = divmod(value - dt.datetime(1970, 1, 1, tzinfo=dt.UTC), dt.timedelta(milliseconds=1))
    if rest:
        raise PriceBookError(f"{where}: effective_from is {value}; milliseconds are the finest there is")
    return milliseconds


def _picodollars(value: object, field: str, where: str) -> int:
    if not isinstance(value, str) or not _PRICE.match(value):
        raise PriceBookError(
            f'{where}: {field} is {value!r}; write dollars per million tokens as text, like "0.15",'
            " with at most six decimals and below a million"
        )
    return int(Decimal(value) * 1_000_000)


def _refuse_overlaps(prices: Iterable[Price], source: str) -> None:
    seen: dict[object, Price] = {}
    for price in prices:
        for key in ((price.model, price.tier, price.effective_from_ms), price.name):
            other = seen.setdefault(key, price)
            if other is price:
                continue
            if key == price.name:
                raise PriceBookError(f"{source}: two prices are named {price.name!r}; give each its own name")
            raise PriceBookError(
                f"{source}: {other.name!r} and {price.name!r} begin at the same time for the same model and tier;"
                " keep one of them"
            )


def _by_time(price: Price) -> tuple[str, str, int]:
    return price.model, price.tier, price.effective_from_ms
