"""Rating."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from usages import NOON_MS, usage

from billing.charge import MAX_TOKENS, Line, charge, is_billable, proves, rate
from billing.errors import BadUsage
from billing.fake import FakeLedger
from billing.prices import UNPRICED, Price, parse
from wire.messages import Usage

PRICE = Price(
    name="a",
    model="simulated",
    tier="*",
    effective_from_ms=0,
    currency="USD",
    input_picodollars=150_000,
    cached_input_picodollars=75_000,
    output_picodollars=600_000,
)
REASONS = (
    "stop",
    "length",
    "tool_calls",
    "content_filter",
    "cancelled",
    "timeout",
    "expired",
    "refused",
    "moved",
    "error",
)
DAY_MS = 86_400_000


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    prompt = draw(st.integers(0, 300_000))
    return usage(
        f"r{draw(st.integers(0, 5))}",
        attempt=draw(st.integers(1, 3)),
        reason=draw(st.sampled_from(REASONS)),
        prompt_tokens=prompt,
        cached_tokens=draw(st.integers(0, prompt)),
        completion_tokens=draw(st.integers(0, 10_000)),
        created_ms=NOON_MS + draw(st.integers(0, 3 * DAY_MS)),
    )


def test_prompt_cached_and_completion_have_their_own_prices() -> None:
    # 6 × 150,000 + 4 × 75,000 + 7 × 600,000 = 5,400,000 pico-dollars = 5,400 nano-dollars
    assert charge(usage(), PRICE).amount_nanodollars == 5_400


def test_cached_tokens_cost_the_cached_price() -> None:
    # 5,005 × 150,000 + 257,955 × 75,000 = 20,097,375,000 pico-dollars
    line = charge(usage(prompt_tokens=262_960, cached_tokens=257_955, completion_tokens=0), PRICE)
    assert line.amount_nanodollars == 20_097_375


def test_two_choices_count_the_prompt_once() -> None:
    # two choices of 5 tokens: 10 × 150,000 + 10 × 600,000
    line = charge(usage(prompt_tokens=10, cached_tokens=0, completion_tokens=2 * 5), PRICE)
    assert line.amount_nanodollars == 7_500


def test_an_amount_is_rounded_once_half_a_nanodollar_upwards() -> None:
    cheap = replace(PRICE, input_picodollars=100, cached_input_picodollars=0, output_picodollars=0)
    amounts = [charge(usage(prompt_tokens=n, cached_tokens=0), cheap).amount_nanodollars for n in (4, 5, 14, 15)]
    assert amounts == [0, 1, 1, 2]


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "content_filter"])
def test_what_ended_by_itself_is_billed_even_without_a_token(reason: str) -> None:
    assert charge(usage(reason=reason, completion_tokens=0), PRICE).amount_nanodollars == 1_200


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_what_was_broken_off_is_billed_if_anything_was_generated(reason: str) -> None:
    assert charge(usage(reason=reason, completion_tokens=0), PRICE).amount_nanodollars == 0
    assert charge(usage(reason=reason, completion_tokens=1), PRICE).amount_nanodollars == 1_800


@pytest.mark.parametrize("reason", ["expired", "refused", "moved", "error"])
def test_what_failed_is_recorded_and_never_billed(reason: str) -> None:
    line = charge(usage(reason=reason), PRICE)
    assert (line.billable, line.amount_nanodollars) == (False, 0)
    assert line.price_id == PRICE.price_id


def test_without_a_price_the_amount_is_zero_and_the_line_says_so() -> None:
    line = charge(usage(), None)
    assert (line.price_id, line.billable, line.amount_nanodollars) == (UNPRICED, True, 0)
    assert proves(line)


def test_the_price_is_that_of_the_moment_the_request_was_created() -> None:
    book = parse(
        'currency = "USD"\n'
        '[[price]]\nname = "old"\nmodel = "simulated"\neffective_from = 2025-01-01T00:00:00Z\n'
        'input = "1"\ncached_input = "1"\noutput = "1"\n'
        '[[price]]\nname = "new"\nmodel = "simulated"\neffective_from = 2026-01-01T12:00:00Z\n'
        'input = "2"\ncached_input = "2"\noutput = "2"\n'
    )
    late = NOON_MS + 3_600_000
    amounts = [rate(usage(created_ms=ms, finished_ms=late), book).amount_nanodollars for ms in (NOON_MS - 1, NOON_MS)]
    assert amounts == [17_000, 34_000]


@given(usages())
def test_every_line_proves_itself(entry: Usage) -> None:
    line = charge(entry, PRICE)
    assert proves(line)
    assert line.amount_nanodollars >= 0
    assert not proves(replace(line, amount_nanodollars=line.amount_nanodollars + 1))


@given(usages())
def test_rating_is_the_exact_sum_to_half_a_nanodollar(entry: Usage) -> None:
    exact = (
        (entry.prompt_tokens - entry.cached_tokens) * 150_000
        + entry.cached_tokens * 75_000
        + entry.completion_tokens * 600_000
    )
    billed = is_billable(entry.reason, entry.completion_tokens)
    assert abs(charge(entry, PRICE).amount_nanodollars * 1_000 - exact * billed) <= 500


@given(st.lists(usages(), max_size=30), st.integers(0, 2**32))
def test_replay_never_changes_a_bill(entries: Sequence[Usage], seed: int) -> None:
    # an attempt has one usage: the first of each key
    lines = list({(u.request_id, u.attempt): charge(u, PRICE) for u in reversed(entries)}.values())
    once, again = FakeLedger(), FakeLedger()
    once.insert(lines)
    shuffled = lines * 3
    random.Random(seed).shuffle(shuffled)
    for start in range(0, len(shuffled), 4):
        again.insert(shuffled[start : start + 4])
    whole = (0, NOON_MS + 10 * DAY_MS, "UTC")
    assert again.totals("acme", *whole) == once.totals("acme", *whole)


@given(
    st.lists(usages(), max_size=30),
    st.sampled_from(["UTC", "Asia/Kolkata", "America/St_Johns", "Pacific/Kiritimati", "Australia/Lord_Howe"]),
)
def test_days_of_any_time_zone_sum_to_the_range(entries: Sequence[Usage], tz: str) -> None:
    ledger = FakeLedger()
    ledger.insert([charge(u, PRICE) for u in entries])
    span = (NOON_MS, NOON_MS + 4 * DAY_MS)
    winners = ledger.lines({("acme", u.request_id) for u in entries})
    expected = sum(line.amount_nanodollars for line in winners.values())
    assert sum(total.amount_nanodollars for total in ledger.totals("acme", *span, tz)) == expected
    hours = [
        total.amount_nanodollars
        for start in range(*span, 3_600_000)
        for total in ledger.totals("acme", start, start + 3_600_000, tz)
    ]
    assert sum(hours) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_tokens": -1},
        {"prompt_tokens": MAX_TOKENS + 1},
        {"completion_tokens": -1},
        {"cached_tokens": 11},
        {"created_ms": -1},
        {"finished_ms": 4_102_444_800_000},
        {"first_token_ms": -5},
        {"finish_offset": -1},
        {"ref": 2**63},
        {"attempt": 0},
        {"shard": -1},
        {"request_id": ""},
        {"tenant": ""},
    ],
)
def test_what_no_journal_gives_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(BadUsage):
        charge(usage(**changes), PRICE)


def test_no_first_token_is_no_fault() -> None:
    line: Line = charge(usage(first_token_ms=None), PRICE)
    assert line.usage.first_token_ms is None


def test_the_highest_amount_fits_64_bits() -> None:
    dear = replace(PRICE, input_picodollars=10**12 - 1, cached_input_picodollars=0, output_picodollars=10**12 - 1)
    most = usage(prompt_tokens=MAX_TOKENS, cached_tokens=0, completion_tokens=MAX_TOKENS)
    assert charge(most, dear).amount_nanodollars < 2**63
