"""Statements."""

from __future__ import annotations

from decimal import Decimal

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from usages import NOON_MS, usage

from billing.charge import rate
from billing.errors import BadStatement, LedgerAway
from billing.fake import FakeLedger
from billing.prices import load
from billing.statement import as_json, as_text, dollars, month_span_ms, statement

DAY_MS = 86_400_000


def ledger(*changes: dict[str, object]) -> FakeLedger:
    fake = FakeLedger()
    fake.insert([rate(usage(f"r{number}", **change), load(None)) for number, change in enumerate(changes)])
    return fake


def test_a_bill_adds_up_by_day_model_and_tier() -> None:
    bill = statement(
        ledger({}, {}, {"created_ms": NOON_MS + DAY_MS}, {"tier": "flex"}, {"model": "SmolLM2-135M-Instruct"}),
        "acme",
        "2026-01",
    )
    # simulated: 6 × 100 + 4 × 50 + 7 × 400 = 3,600 nano-dollars; SmolLM2: 6 × 150 + 4 × 75 + 7 × 600 = 5,400
    assert [(row.day, row.model, row.tier, row.amount_nanodollars) for row in bill.days] == [
        ("2026-01-01", "SmolLM2-135M-Instruct", "default", 5_400),
        ("2026-01-01", "simulated", "default", 7_200),
        ("2026-01-01", "simulated", "flex", 3_600),
        ("2026-01-02", "simulated", "default", 3_600),
    ]
    assert [(row.model, row.tier, row.requests) for row in bill.models] == [
        ("SmolLM2-135M-Instruct", "default", 1),
        ("simulated", "default", 3),
        ("simulated", "flex", 1),
    ]
    assert bill.total.amount_nanodollars == 19_800
    assert bill.total.completion_tokens == 35


def test_the_highest_attempt_alone_is_billed() -> None:
    fake = FakeLedger()
    fake.insert([rate(usage(attempt=1), load(None)), rate(usage(attempt=2, completion_tokens=8), load(None))])
    total = statement(fake, "acme", "2026-01").total
    assert (total.requests, total.completion_tokens) == (1, 8)


def test_another_tenant_or_month_is_not_on_the_bill() -> None:
    fake = ledger({"tenant": "other"}, {"created_ms": NOON_MS + 40 * DAY_MS})
    assert statement(fake, "acme", "2026-01").days == ()
    assert statement(fake, "acme", "2026-01").total.requests == 0


def test_a_month_begins_at_midnight_of_its_time_zone() -> None:
    from_ms, to_ms = month_span_ms("2026-12", "Asia/Kolkata")
    # 2026-12-01 00:00 +05:30 = 2026-11-30 18:30 UTC
    assert from_ms == 1_796_063_400_000
    assert to_ms - from_ms == 31 * DAY_MS


def test_a_month_with_a_clock_change_is_an_hour_shorter() -> None:
    from_ms, to_ms = month_span_ms("2026-03", "Europe/Berlin")
    assert to_ms - from_ms == 31 * DAY_MS - 3_600_000


@pytest.mark.parametrize(
    "month", ["", "2026", "2026-13", "2026-00", "26-01", "2026-1", "2026-01-01", "1969-12", "2100-01"]
)
def test_what_is_no_month_is_refused(month: str) -> None:
    with pytest.raises(BadStatement, match="isn't a month"):
        statement(FakeLedger(), "acme", month)


@pytest.mark.parametrize("tz", ["", "Mars/Olympus", "../etc/passwd", "\0"])
def test_what_is_no_time_zone_is_refused(tz: str) -> None:
    with pytest.raises(BadStatement, match="isn't a time zone"):
        statement(FakeLedger(), "acme", "2026-01", tz)


@given(st.integers(-(2**63), 2**63))
def test_dollars_are_exact(nanodollars: int) -> None:
    assert Decimal(dollars(nanodollars)).scaleb(9) == nanodollars


def test_the_text_shows_exact_dollars_and_warns_of_what_has_no_price() -> None:
    text = as_text(statement(ledger({}, {"model": "unheard-of"}), "acme", "2026-01"))
    assert "0.000003600" in text
    assert "the price book had no price for 1 of these requests" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_text_without_unpriced_requests_warns_of_nothing() -> None:
    assert "Warning" not in as_text(statement(ledger({}), "acme", "2026-01"))


def test_the_json_holds_integers_and_exact_text() -> None:
    bill = orjson.loads(orjson.dumps(as_json(statement(ledger({}, {"reason": "error"}), "acme", "2026-01"))))
    assert bill["total"]["amount_nanodollars"] == 3_600
    assert bill["total"]["amount"] == "0.000003600"
    assert (bill["total"]["requests"], bill["total"]["billed_requests"]) == (2, 1)
    assert bill["days"][0]["day"] == "2026-01-01"
    assert bill["models"][0]["model"] == "simulated"


def test_a_ledger_that_is_away_is_said() -> None:
    fake = ledger()
    fake.away = True
    with pytest.raises(LedgerAway):
        statement(fake, "acme", "2026-01")
