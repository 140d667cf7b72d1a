"""Whether a price book may be used: a price that was in effect is never changed, so that a replay never changes a bill.

The ledger remembers every price it adopted. A book that lacks one that has begun, or whose new price would reach back
over attempts that are already recorded, is refused. Prices that have not begun may come, change and go.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from billing.errors import PriceBookError
from billing.ledger import Ledger
from billing.prices import Price, PriceBook


def adopt(ledger: Ledger, book: PriceBook, now_ms: int) -> Sequence[Price]:
    """Take the book into use; the prices that were new. PriceBookError when it would change what was billed."""
    adopted = ledger.adopted_prices()
    fresh, withdrawn = changes(book, adopted, now_ms)
    for price in fresh:
        touched = ledger.attempts_since(price.model, price.tier, price.effective_from_ms)
        if price.effective_from_ms <= now_ms and touched:
            raise PriceBookError(
                f"price {price.name!r} begins {_when(price.effective_from_ms)}, before {touched} attempts that are"
                " already in the ledger; give it an effective_from in the future"
            )
    ledger.adopt(fresh, now_ms)
    ledger.withdraw(withdrawn, now_ms)
    return fresh


def changes(book: PriceBook, adopted: Sequence[Price], now_ms: int) -> tuple[Sequence[Price], Sequence[Price]]:
    """(prices to adopt, prices to withdraw because they left the book before they began). Pure.

    PriceBookError when one that has begun is missing or changed.
    """
    offered = {price.price_id for price in book.prices}
    withdrawn = [price for price in adopted if price.price_id not in offered]
    for price in withdrawn:
        if price.effective_from_ms <= now_ms:
            raise PriceBookError(
                f"price {price.name!r}, in effect since {_when(price.effective_from_ms)}, was changed or taken out"
                " of the price book; put it back as it was and add a price with a later effective_from"
            )
    known = {price.price_id for price in adopted}
    return [price for price in book.prices if price.price_id not in known], withdrawn


def _when(ms: int) -> str:
    return dt.datetime.fromtimestamp(ms / 1000, dt.UTC).isoformat(timespec="seconds")
