"""The board: what an ingress knows of engines between two signals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_world import NOW_MS, STEP, candidates, signal

from routing.board import MEMORY_MS, REBASE, Board
from routing.penalties import MAX_PENALTY
from routing.row import PRIOR, TRUST_MS
from wire.messages import Dispatch, StepCost

CHAIN = tuple(range(100, 110))
A, B, C = candidates(3)


def board(**fields: object) -> Board:
    return Board(**({"travel_ms": 1.0} | fields))  # type: ignore[arg-type]


def backlog_ms(of: Board, now_ms: float) -> float:
    return float(of.state(of.rows([A]), now_ms).backlog_ms[0])


def test_what_was_sent_waits_and_is_computed_as_time_passes() -> None:
    mine = board()
    mine.heard(signal(0, step=STEP))
    mine.sent(("r", 1), A, 9_000, (), NOW_MS)
    # two pieces of 8,000 and 1,000 tokens: 20 ms, and 0.01 a token. While it lasts 90 of 100 ms are spent on it
    assert backlog_ms(mine, NOW_MS) == pytest.approx(110)
    assert backlog_ms(mine, NOW_MS + 100) == pytest.approx(110 - 100 * 90 / 100.18, abs=0.1)
    assert backlog_ms(mine, NOW_MS + 200) == 0


def test_a_signal_takes_the_place_of_what_it_has_seen() -> None:
    mine = board()
    mine.heard(signal(0, step=STEP))
    mine.sent(("old", 1), A, 1_000, (), NOW_MS + 10)
    mine.sent(("new", 1), A, 2_000, (), NOW_MS + 400)
    mine.heard(signal(0, step=STEP, at_ms=NOW_MS + 300, running=1, slacks_ms=(0,)))
    assert backlog_ms(mine, NOW_MS + 400) == pytest.approx(30)
    mine.told([Dispatch(fleet=A.fleet, shard=0, prompt_tokens_estimate=1_000)], NOW_MS + 100)  # a late word of it
    assert backlog_ms(mine, NOW_MS + 400) == pytest.approx(30)
    assert mine.held(mine.rows([A])).tolist() == [2]


@pytest.mark.parametrize("outcome", [None, "client_error", "overloaded", "timed_out", "failed"])
def test_a_prompt_that_was_refused_is_not_waited_for(outcome: str | None) -> None:
    mine = board()
    mine.heard(signal(0, step=STEP))
    mine.sent(("short", 1), A, 1_000, (), NOW_MS)
    mine.sent(("long", 1), A, 9_000, (), NOW_MS)
    assert backlog_ms(mine, NOW_MS) == pytest.approx(130)
    mine.ended(("long", 1), outcome, NOW_MS)  # type: ignore[arg-type]
    assert backlog_ms(mine, NOW_MS) == pytest.approx(20)
    mine.ended(("short", 1), outcome, NOW_MS)  # type: ignore[arg-type]
    assert backlog_ms(mine, NOW_MS) == pytest.approx(0)


def test_a_prompt_that_cannot_be_computed_keeps_nobody_waiting() -> None:
    mine = board()
    mine.heard(signal(0, step=STEP, context_tokens=4_000))
    mine.sent(("r", 1), A, 1_000_000, CHAIN, NOW_MS)
    mine.told([Dispatch(fleet=A.fleet, shard=0, prompt_tokens_estimate=1_000_000)], NOW_MS)
    assert backlog_ms(mine, NOW_MS) == 0
    assert mine.held(mine.rows([A])).tolist() == [2]


def test_choices_gain_on_their_pace_unless_prompts_stall_them() -> None:
    mine = board()
    mine.heard(signal(0, step=STEP, running=4, slacks_ms=(10, 50)))
    state = mine.state(mine.rows([A]), NOW_MS + 100)
    assert state.gained_ms.tolist() == pytest.approx([100 / 10 * 25 - 100])
    crowd = mine.crowd(np.array([0]), state.backlog_ms, state.gained_ms, state.rested_ms)
    assert crowd.behind_ms[0, :2].tolist() == pytest.approx([-10 - 150, -50 - 150])
    assert crowd.weights[0].tolist() == [2, 2, 0, 0, 0, 0, 0, 0, 0]
    mine.sent(("r", 1), A, 8_000, (), NOW_MS)
    stalled = mine.state(mine.rows([A]), NOW_MS + 50)
    assert stalled.gained_ms[0] < -30, "nine tenths of the time go to the prompt"


def test_a_long_silence_is_not_extrapolated() -> None:
    mine = board()
    mine.heard(signal(0, step=STEP, running=1, slacks_ms=(0,)))
    first, later = (mine.state(mine.rows([A]), NOW_MS + ms).gained_ms[0] for ms in (TRUST_MS, 100 * TRUST_MS))
    assert first == later


def test_an_engine_that_never_spoke_is_the_mean_of_the_others() -> None:
    mine = board()
    mine.heard(signal(0, step=STEP, running=10))
    mine.heard(signal(2, step=STEP, running=20))
    rows = mine.rows([A, B, C])
    assert mine.held(rows).tolist() == [10, 15, 20]
    assert mine.speaks(rows).tolist() == [True, False, True]
    assert mine.held(mine.rows([B])).tolist() == [0], "alone there is nothing to compare it with"


def test_rows_that_follow_one_another_are_a_slice() -> None:
    mine = board()
    assert mine.rows([A, B, C]) == slice(0, 3)
    assert np.array_equal(mine.rows([C, A]), [2, 0])
    assert len(mine.rows([])) == 0  # type: ignore[arg-type]


def test_an_engine_that_tells_nothing_of_its_steps_is_slower_the_fuller_it_is() -> None:
    mine = board()
    mine.heard(signal(0, running=16, queued_requests=16, slots=32))
    assert mine.state(mine.rows([A]), NOW_MS).decode_ms.tolist() == [2 * PRIOR.decode_ms]


def test_what_was_sent_lately_fades() -> None:
    mine = board()
    for n in range(8):
        mine.sent((str(n), 1), A, 10, (), NOW_MS)
    rows = mine.rows([A, B])
    assert mine.lately(rows, NOW_MS).tolist() == pytest.approx([8, 0])
    assert mine.lately(rows, NOW_MS + MEMORY_MS).tolist() == pytest.approx([8 / np.e, 0])
    later_ms = NOW_MS + (REBASE + 1) * MEMORY_MS
    mine.sent(("late", 1), B, 10, (), later_ms)
    assert mine.lately(rows, later_ms).tolist() == pytest.approx([0, 1], abs=1e-6)


def test_silent_is_who_was_ready_and_is_heard_no_more_while_others_are() -> None:
    mine = board()
    rows = mine.rows([A, B, C])
    assert mine.silent(rows, 1_500).tolist() == [False] * 3, "nobody was ever heard"
    mine.heard(signal(0, at_ms=NOW_MS))
    mine.heard(signal(1, at_ms=NOW_MS + 1_500))
    assert mine.silent(rows, 1_500).tolist() == [False] * 3
    mine.heard(signal(1, at_ms=NOW_MS + 1_501))
    assert mine.silent(rows, 1_500).tolist() == [True, False, False], "one never heard isn't silent"
    assert mine.living(rows, 1_500).tolist() == [False, True, True]
    mine.heard(signal(1, at_ms=NOW_MS + 1_502, state="draining"))
    assert mine.silent(rows, 1_500).tolist() == [False] * 3, "nobody that is ready is heard: it's the log"
    mine.heard(signal(2, at_ms=NOW_MS + 9_000))
    assert mine.silent(rows, 1_500).tolist() == [True, False, False], "who says that it drains does what it has"


def test_an_engine_that_changes_its_primary_leaves_its_row_to_others() -> None:
    mine = board()
    mine.heard(signal(0, engine="x"))
    mine.heard(signal(1, engine="x"))
    assert mine.living(mine.rows([A, B]), 1_000).tolist() == [False, True]
    mine.heard(signal(0, engine="y"))
    mine.heard(signal(2, engine="x"))  # what it left twice ago is another's now
    assert mine.living(mine.rows([A, B, C]), 1_000).tolist() == [True, False, True]
    mine.heard(signal(0, engine="z"))
    mine.heard(signal(1, engine="y"))
    assert mine.living(mine.rows([A, B]), 1_000).tolist() == [True, True], "the shard of z is not y's to take away"
    mine.heard(signal(engine="y", shards=()))
    mine.heard(signal(engine="new", shards=()))
    assert mine.living(mine.rows([A, B]), 1_000).tolist() == [True, False]


def test_a_prompt_that_is_cached_costs_its_last_token() -> None:
    mine = board()
    mine.heard(signal(0, step=STEP, prefixes_added=CHAIN))
    mine.sent(("r", 1), A, 640, CHAIN, NOW_MS)
    assert backlog_ms(mine, NOW_MS) == pytest.approx(10 + 0.01)


def test_an_attempt_that_is_sent_again_is_where_it_went_last() -> None:
    mine = board()
    mine.sent(("r", 1), A, 1, (), NOW_MS)
    mine.sent(("r", 1), B, 1, (), NOW_MS)
    assert (mine.open_at(A), mine.open_at(B), mine.open_at(C)) == (0, 1, 0)


def test_risk_is_what_is_left_of_a_penalty() -> None:
    mine = board()
    mine.sent(("r", 1), A, 1, (), NOW_MS)
    mine.ended(("r", 1), "failed", NOW_MS)
    rows = mine.rows([A, B])
    assert mine.risk(rows, NOW_MS).tolist() == pytest.approx([0.5, 0])
    assert mine.risk(rows, NOW_MS + 5_000).tolist() == pytest.approx([1 - 2**-0.5, 0])


def test_distance_is_the_regions() -> None:
    here, there = candidates(1)[0], candidates(1, region="there")[0]
    mine = board(trips_ms={"there": 90.0})
    assert np.array(mine.trips_ms(mine.rows([here, there]))).tolist() == [0, 90]
    assert board().trips_ms(mine.rows([here, there])) == 0


steps = st.lists(
    st.tuples(
        st.sampled_from(["sent", "ended", "heard", "reborn", "told"]),
        st.integers(0, 2),
        st.integers(0, 5),
        st.integers(-200, 2_000),
        st.sampled_from([None, "answered", "client_error", "overloaded", "timed_out", "failed"]),
    ),
    max_size=60,
)


@given(steps)
def test_no_count_is_ever_negative_and_nothing_stops_being_a_number(
    said: list[tuple[str, int, int, int, str | None]],
) -> None:
    mine, now_ms = board(), float(NOW_MS)
    places = [A, B, C]
    open_: dict[tuple[str, int], int] = {}
    for what, shard, number, passed_ms, outcome in said:
        now_ms += passed_ms
        name = (str(number), 1)
        if what == "sent":
            mine.sent(name, places[shard], number * 1_000, (), now_ms)
            open_[name] = shard
        elif what == "ended":
            mine.ended(name, outcome, now_ms)  # type: ignore[arg-type]
            open_.pop(name, None)
        elif what == "told":
            mine.told([Dispatch(fleet=A.fleet, shard=shard, prompt_tokens_estimate=number)], now_ms)
        else:
            life = "a" if what == "heard" else str(number)
            mine.heard(signal(shard, incarnation=life, at_ms=round(now_ms), running=number - 2, step=STEP))
        rows = mine.rows(places)
        assert [mine.open_at(place) for place in places] == [list(open_.values()).count(n) for n in range(3)]
        assert (mine.held(rows) >= 0).all()
        assert (mine.lately(rows, now_ms) >= 0).all()
        assert ((mine.risk(rows, now_ms) >= 0) & (mine.risk(rows, now_ms) <= 1 - 2.0**-MAX_PENALTY)).all()
        state = mine.state(rows, now_ms)
        for numbers in (state.backlog_ms, state.decode_ms, state.gained_ms):
            assert np.isfinite(numbers).all()
        assert (state.backlog_ms >= 0).all()


def test_an_attempt_that_ends_makes_its_engine_lighter_before_the_next_signal() -> None:
    mine = board()
    mine.sent(("old", 1), A, 10_000, (), NOW_MS - 5_000)
    mine.heard(signal(0, step=STEP, running=2, slacks_ms=(0, 100)))
    mine.sent(("new", 1), A, 20_000, (), NOW_MS + 10)
    rows = mine.rows([A])
    assert mine.state(rows, NOW_MS + 10).decode_ms.tolist() == pytest.approx([10 + 20_000 * 2e-5])
    mine.ended(("new", 1))
    assert mine.held(rows).tolist() == [2]
    mine.ended(("old", 1))
    assert mine.held(rows).tolist() == [1]
    lighter_ms = (10_000 + mine.lengths.mean_tokens) * 2e-5
    assert mine.state(rows, NOW_MS + 10).decode_ms.tolist() == pytest.approx([10 - lighter_ms])
    mine.sent(("unseen", 1), A, 1, (), NOW_MS - 5_000)
    mine.heard(signal(0, step=STEP, at_ms=NOW_MS + 100))
    mine.ended(("unseen", 1))
    assert mine.held(rows).tolist() == [0]


def test_who_no_longer_waits_gathers_slack_too() -> None:
    mine = board()
    mine.heard(signal(0, step=STEP))
    mine.sent(("r", 1), A, 1_000, (), NOW_MS)
    mine.sent(("s", 1), A, 1_000, (), NOW_MS + 1_000)
    state = mine.state(mine.rows([A]), NOW_MS + 1_000)
    # 20 ms of work take 22.2 of time; then the first one gains 15 ms in each 10, and the second nothing yet
    assert state.rested_ms.tolist() == pytest.approx([(1_000 - 22.2) * 1.5 / 2], rel=0.01)


def test_a_step_that_takes_less_than_no_time_is_not_believed() -> None:
    mine = board()
    absurd = StepCost(prefill_fixed_ms=-5, prefill_token_ms=-1, prefill_square_ms=-1, decode_ms=-3, decode_token_ms=-1)
    mine.heard(signal(0, step=absurd, queued_tokens=5_000, running=3))
    mine.sent(("r", 1), A, 5_000, (), NOW_MS)
    state = mine.state(mine.rows([A]), NOW_MS + 100)
    assert state.backlog_ms[0] >= 0
    assert state.decode_ms[0] > 0
    assert np.isfinite(state.gained_ms).all()
