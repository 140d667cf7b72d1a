"""The contract of the ledger: ClickHouse and the fake answer alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from clickhouse_process import RunningClickHouse
from usages import FLEET, NOON_MS, usage

from billing.charge import Line, rate
from billing.fake import FakeLedger
from billing.ledger import Ledger, Total
from billing.prices import PriceBook, load
from billing.statement import month_span_ms, statement
from billing.store import LedgerStore
from wire.fleet import Fleet

OTHER = Fleet("local", "cpu", "simulated", "2", "sim")
DAY_MS = 86_400_000
JANUARY = month_span_ms("2026-01", "UTC")


@pytest.fixture(params=["clickhouse", "fake"])
def ledger(request: pytest.FixtureRequest, suffix: str) -> Iterator[Ledger]:
    if request.param == "fake":
        yield FakeLedger()
        return
    running: RunningClickHouse = request.getfixturevalue("clickhouse")
    store = LedgerStore(running.settings(f"contract_{suffix}"))
    store.apply_schema()
    yield store
    store.close()


@pytest.fixture(scope="module")
def book() -> PriceBook:
    return load(None)


def line(book: PriceBook, request_id: str = "r1", **changes: object) -> Line:
    return rate(usage(request_id, **changes), book)


def test_a_line_comes_back_as_it_was_recorded(ledger: Ledger, book: PriceBook) -> None:
    odd = 'a "quote" \\ and\ttab, ünïcode, \x00 and {}'
    lines = [
        line(book),
        line(book, "r2", first_token_ms=None, reason="refused"),
        line(book, "r3", tier=odd, project=odd),
    ]
    ledger.insert(lines)
    assert ledger.lines({("acme", "r1"), ("acme", "r2"), ("acme", "r3")}) == {
        each.usage.request_id: each for each in lines
    }


def test_nothing_is_asked_for_nothing_comes(ledger: Ledger) -> None:
    ledger.insert([])
    assert ledger.lines(()) == {}
    assert list(ledger.tenants(*JANUARY)) == []
    assert list(ledger.totals("acme", *JANUARY, "UTC")) == []


def test_the_highest_attempt_is_the_line_whichever_came_first(ledger: Ledger, book: PriceBook) -> None:
    ledger.insert([line(book, attempt=2, completion_tokens=9), line(book, attempt=1)])
    ledger.insert([line(book, attempt=3, reason="error")])
    ledger.insert([line(book, attempt=1)])
    assert ledger.lines({("acme", "r1")})["r1"].usage.attempt == 3


def test_attempts_that_were_created_in_different_months_are_still_one_line(ledger: Ledger, book: PriceBook) -> None:
    ledger.insert([line(book), line(book, attempt=2, created_ms=NOON_MS + 35 * DAY_MS)])
    assert list(ledger.totals("acme", *JANUARY, "UTC")) == []
    (total,) = ledger.totals("acme", *month_span_ms("2026-02", "UTC"), "UTC")
    assert total.requests == 1


def test_the_same_request_id_of_another_tenant_is_another_request(ledger: Ledger, book: PriceBook) -> None:
    ledger.insert([line(book), line(book, tenant="other", attempt=2)])
    assert ledger.lines({("acme", "r1")})["r1"].usage.tenant == "acme"
    assert list(ledger.tenants(*JANUARY)) == ["acme", "other"]


def test_the_same_batch_inserted_four_times_changes_no_roll_up(ledger: Ledger, book: PriceBook) -> None:
    batch = [line(book, f"r{n}") for n in range(50)]
    ledger.insert(batch)
    once = list(ledger.totals("acme", *JANUARY, "UTC"))
    for start in (0, 10, 25):
        ledger.insert(batch[start:] + batch[:start])
    assert list(ledger.totals("acme", *JANUARY, "UTC")) == once
    assert ledger.attempts_since("*", "*", 0) == 50


def test_totals_count_billed_tokens_and_show_what_has_no_price(ledger: Ledger, book: PriceBook) -> None:
    ledger.insert([line(book), line(book, "r2", reason="error"), line(book, "r3", model="unheard-of")])
    assert list(ledger.totals("acme", *JANUARY, "UTC")) == [
        Total(
            day="2026-01-01",
            model="simulated",
            tier="default",
            requests=2,
            billed_requests=1,
            unpriced_requests=0,
            prompt_tokens=10,
            cached_tokens=4,
            completion_tokens=7,
            amount_nanodollars=3_600,
        ),
        Total(
            day="2026-01-01",
            model="unheard-of",
            tier="default",
            requests=1,
            billed_requests=1,
            unpriced_requests=1,
            prompt_tokens=10,
            cached_tokens=4,
            completion_tokens=7,
            amount_nanodollars=0,
        ),
    ]


@pytest.mark.parametrize("tz", ["UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Kiritimati"])
def test_single_days_sum_to_the_month(ledger: Ledger, book: PriceBook, tz: str) -> None:
    ledger.insert([line(book, f"r{n}", created_ms=NOON_MS + n * 3_600_000, completion_tokens=n) for n in range(200)])
    from_ms, to_ms = month_span_ms("2026-01", tz)
    days = [ledger.totals("acme", start, start + DAY_MS, tz) for start in range(from_ms, to_ms, DAY_MS)]
    assert all(len(day) <= 1 for day in days)
    month = statement(ledger, "acme", "2026-01", tz)
    assert [total for day in days for total in day] == list(month.days)
    assert sum(total.amount_nanodollars for day in days for total in day) == month.total.amount_nanodollars
    assert month.total.requests == 200


def test_attempts_are_found_by_where_they_finished(ledger: Ledger, book: PriceBook) -> None:
    lines = [line(book, f"r{n}", finish_offset=n) for n in range(10)]
    elsewhere = [line(book, "s", shard=1, finish_offset=4), line(book, "t", fleet=OTHER, finish_offset=4)]
    ledger.insert([*lines, *elsewhere])
    assert list(ledger.attempts_between(FLEET, 0, 3, 6, 100)) == lines[3:6]
    assert list(ledger.attempts_between(FLEET, 0, 3, 6, 2)) == lines[3:5]
    assert list(ledger.attempts_between(FLEET, 1, 0, 100, 100)) == elsewhere[:1]


def test_attempts_since_a_time_are_counted_by_model_and_tier(ledger: Ledger, book: PriceBook) -> None:
    ledger.insert([line(book), line(book, "r2", model="other"), line(book, "r3", tier="flex", created_ms=NOON_MS + 9)])
    asked = [
        ("*", "*", 0),
        ("simulated", "*", 0),
        ("*", "flex", 0),
        ("simulated", "default", 0),
        ("*", "*", NOON_MS + 1),
    ]
    assert [ledger.attempts_since(*question) for question in asked] == [3, 2, 1, 1, 1]


def test_prices_are_adopted_and_withdrawn(ledger: Ledger, book: PriceBook) -> None:
    first, second = book.prices
    ledger.adopt([], NOON_MS)
    ledger.adopt([first, second], NOON_MS)
    ledger.adopt([first], NOON_MS)
    assert set(ledger.adopted_prices()) == {first, second}
    ledger.withdraw([second], NOON_MS + 1)
    assert list(ledger.adopted_prices()) == [first]
    ledger.adopt([second], NOON_MS + 2)
    assert set(ledger.adopted_prices()) == {first, second}


def test_a_batch_over_more_months_than_clickhouse_likes_is_taken(ledger: Ledger, book: PriceBook) -> None:
    lines = [line(book, f"r{n}", created_ms=n * 32 * DAY_MS) for n in range(150)]
    ledger.insert(lines)
    assert ledger.attempts_since("*", "*", 0) == 150


def test_the_largest_numbers_survive(ledger: Ledger, book: PriceBook) -> None:
    most = line(book, prompt_tokens=10**9, cached_tokens=0, completion_tokens=10**9, finish_offset=2**62 - 1)
    most = replace(most, amount_nanodollars=2**63 - 1)
    ledger.insert([most])
    assert ledger.lines({("acme", "r1")})["r1"] == most
