"""What a step computes: decode first, then as many prompt tokens as the decoding can bear."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.schedule import (
    LATE_MS,
    PRESSING_MS,
    STARVED_MS,
    Limits,
    PrefillCost,
    Targets,
    Waiting,
    laxity_ms,
    order,
    prefill_tokens,
)

COST = PrefillCost(fixed_ms=10.0, token_ms=0.01)
CURVED = PrefillCost(fixed_ms=16.5, token_ms=0.015, square_ms=4e-7)
LIMITS = Limits(step_tokens=8_000, least_tokens=1_000)
TARGETS = Targets(ttft_ms=2_000, tbt_ms=25)


def prompt(tokens: int, due_in_ms: float = 2_000) -> Waiting:
    return Waiting(tokens=tokens, due_in_ms=due_in_ms)


def planned(
    *waiting: Waiting, slacks_ms: tuple[float, ...] = (), decode_ms: float = 15, cost: PrefillCost = COST
) -> int:
    return prefill_tokens(
        decode_ms=decode_ms, slacks_ms=slacks_ms, waiting=waiting, cost=cost, limits=LIMITS, targets=TARGETS
    )


def test_nothing_waits_nothing_is_computed() -> None:
    assert planned(slacks_ms=(100,)) == 0


def test_while_nothing_decodes_a_step_is_full() -> None:
    assert planned(prompt(3_000)) == 3_000
    assert planned(prompt(3_000), prompt(9_000)) == 8_000


def test_a_step_takes_what_the_least_slack_bears() -> None:
    # 30 ms of slack and the 25 of this token, less 15 of decoding and 10 of fixed cost, at 0.01 ms a token
    assert planned(prompt(9_000), slacks_ms=(500, 30)) == 3_000
    assert planned(prompt(9_000), slacks_ms=(500, 400)) == 8_000


def test_little_that_leaves_prompts_over_waits_for_slack() -> None:
    assert planned(prompt(9_000), slacks_ms=(9,)) == 0  # 900 tokens
    assert planned(prompt(800), slacks_ms=(9,)) == 800  # all there is


def test_a_prompt_that_would_be_late_gets_a_full_piece_whatever_the_slack() -> None:
    # 9,000 tokens take 110 ms, and each of two pieces 15 of decoding
    soon = 140 + PRESSING_MS
    assert planned(prompt(9_000, soon - 1), slacks_ms=(0,)) == 8_000
    assert planned(prompt(9_000, soon + 1), slacks_ms=(0,)) == 0


def test_what_stands_before_a_prompt_presses_with_it() -> None:
    assert planned(prompt(9_000), prompt(100, 140 + PRESSING_MS), slacks_ms=(0,)) == 8_000


def test_a_prompt_that_is_late_anyway_presses_nobody() -> None:
    assert planned(prompt(9_000, -1), slacks_ms=(0,)) == 0
    assert planned(prompt(9_000, 140 + LATE_MS), slacks_ms=(0,)) == 0


def test_who_is_behind_the_pace_holds_nobody_up() -> None:
    assert planned(prompt(9_000), slacks_ms=(-5,)) == 8_000
    assert planned(prompt(9_000), slacks_ms=(-5, 30)) == 3_000


def test_when_decoding_alone_is_too_slow_waiting_would_gather_nothing() -> None:
    assert planned(prompt(9_000), slacks_ms=(0,), decode_ms=25) == 8_000


def test_of_a_burst_the_longest_prompt_goes_first_and_a_lost_one_last() -> None:
    burst = [prompt(500), prompt(9_000), prompt(4_000), prompt(20_000, 10), prompt(100, -5)]
    assert order(burst, COST, 8_000) == [1, 2, 0, 3, 4]


def test_a_prompt_that_is_late_waits_behind_those_in_time_but_not_for_ever() -> None:
    assert order([prompt(500), prompt(500, -1), prompt(500, -STARVED_MS - 1)], COST, 8_000) == [2, 0, 1]


def test_an_earlier_prompt_goes_before_a_later_one_of_its_length() -> None:
    assert order([prompt(500, 1_900), prompt(500, 300)], COST, 8_000) == [1, 0]


def test_laxity_counts_every_pieces_fixed_cost() -> None:
    assert laxity_ms(prompt(9_000, 500), COST, 8_000) == pytest.approx(500 - 2 * 10 - 90)


@given(st.integers(1, 40_000))
def test_as_many_tokens_as_fit_a_time(tokens: int) -> None:
    for cost in (COST, CURVED):
        assert tokens - 1 <= cost.tokens(cost.ms(tokens)) <= tokens
    assert COST.tokens(COST.fixed_ms) == 0
    assert PrefillCost(fixed_ms=10.0, token_ms=0.0).tokens(11) >= tokens


@given(
    st.lists(st.tuples(st.integers(1, 30_000), st.floats(-5_000, 5_000)), max_size=6),
    st.lists(st.floats(-1e4, 1e4), max_size=6),
    st.floats(0, 100),
)
def test_a_step_never_computes_more_than_there_is_or_fits(
    prompts: list[tuple[int, float]], slacks: list[float], decode_ms: float
) -> None:
    waiting = [prompt(*each) for each in prompts]
    tokens = planned(*waiting, slacks_ms=tuple(slacks), decode_ms=decode_ms, cost=CURVED)
    assert 0 <= tokens <= min(LIMITS.step_tokens, sum(each.tokens for each in waiting))
    assert sorted(order(waiting, CURVED, 8_000)) == list(range(len(waiting)))
