"""Taking a price book into use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from usages import NOON_MS, usage

from billing.adoption import adopt
from billing.charge import rate
from billing.errors import PriceBookError
from billing.fake import FakeLedger
from billing.prices import Price, PriceBook

OLD = Price(
    name="old",
    model="simulated",
    tier="*",
    effective_from_ms=0,
    currency="USD",
    input_picodollars=1,
    cached_input_picodollars=1,
    output_picodollars=1,
)
LATER = replace(OLD, name="later", effective_from_ms=NOON_MS + 1_000, input_picodollars=2)


def test_a_book_is_adopted_once() -> None:
    ledger = FakeLedger()
    assert adopt(ledger, PriceBook([OLD]), NOON_MS) == [OLD]
    assert adopt(ledger, PriceBook([OLD]), NOON_MS) == []
    assert ledger.adopted_prices() == [OLD]


def test_a_price_in_effect_can_not_be_changed() -> None:
    ledger = FakeLedger()
    adopt(ledger, PriceBook([OLD]), NOON_MS)
    with pytest.raises(PriceBookError, match="'old', in effect since 1970-01-01T00:00:00"):
        adopt(ledger, PriceBook([replace(OLD, output_picodollars=2)]), NOON_MS)


def test_a_price_in_effect_can_not_be_taken_out() -> None:
    ledger = FakeLedger()
    adopt(ledger, PriceBook([OLD]), NOON_MS)
    with pytest.raises(PriceBookError, match="put it back as it was"):
        adopt(ledger, PriceBook([]), NOON_MS)


def test_a_price_that_has_not_begun_may_change_and_go() -> None:
    ledger = FakeLedger()
    adopt(ledger, PriceBook([OLD, LATER]), NOON_MS)
    adopt(ledger, PriceBook([OLD, replace(LATER, output_picodollars=9)]), NOON_MS)
    adopt(ledger, PriceBook([OLD]), NOON_MS)
    # and what was withdrawn in time isn't missed afterwards
    assert adopt(ledger, PriceBook([OLD]), NOON_MS + 2_000) == []


def test_a_price_may_not_reach_back_over_recorded_attempts() -> None:
    ledger = FakeLedger()
    adopt(ledger, PriceBook([OLD]), NOON_MS)
    ledger.insert([rate(usage(), PriceBook([OLD]))])
    reaching = replace(OLD, name="back", effective_from_ms=NOON_MS)
    with pytest.raises(PriceBookError, match="before 1 attempts that are already in the ledger"):
        adopt(ledger, PriceBook([OLD, reaching]), NOON_MS + 2_000)
    other_model = replace(reaching, model="another")
    assert adopt(ledger, PriceBook([OLD, other_model]), NOON_MS + 2_000) == [other_model]
