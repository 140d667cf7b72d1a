"""The expected loss: late, slow, and what others would miss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.lengths import BUCKET_TOKENS, Lengths
from routing.loss import CALM, DECODE_PRICE, PREFILL_PRICE, Crowd, State, own_loss, prefill_ms, rise, worth
from routing.schedule import Targets

TARGETS = Targets(ttft_ms=2_000, tbt_ms=25)
TABLE = Lengths().table


def state(**fields: float) -> State:
    known: dict[str, float] = {
        "backlog_ms": 0,
        "decode_ms": 10,
        "decode_token_ms": 0,
        "fixed_ms": 10,
        "token_ms": 0.01,
        "square_ms": 0,
        "piece_tokens": 8_000,
        "piece_ms": 90,
        "gained_ms": 0,
        "rested_ms": 0,
    }
    arrays: dict[str, Any] = {name: np.array([value]) for name, value in (known | fields).items()}
    return State(**({"slot_ms": 0.0, "decodes": np.array([True])} | arrays))


def own(prompt_ms: float = 0, waited_ms: float = 0, after_ms: float = 10, speed: float = 1, **fields: float) -> float:
    loss = own_loss(
        state(**fields),
        prompt_ms=np.array([prompt_ms]),
        pieces=0.5,
        after_ms=np.array([after_ms]),
        waited_ms=np.array([waited_ms]),
        worth=np.array([speed]),
        targets=TARGETS,
    )
    return float(loss[0])


def others(
    slacks: list[float], prompt_ms: float, *, before: float = 10, after: float = 10, waiting: float = 0
) -> float:
    crowd = Crowd(np.array([[*(-slack for slack in slacks), 0.0]]), np.array([[*([1.0] * len(slacks)), waiting]]))
    made = rise(
        crowd,
        prompt_ms=np.array([prompt_ms]),
        before_ms=np.array([before]),
        after_ms=np.array([after]),
        table=TABLE,
        targets=TARGETS,
    )
    return float(made[0])


@pytest.mark.parametrize(
    ("tokens", "ms", "pieces"), [(1, 10.01, 1), (8_000, 90, 1), (8_001, 100.01, 2), (20_000, 230, 3)]
)
def test_a_prompt_takes_its_pieces(tokens: int, ms: float, pieces: int) -> None:
    taken, count = prefill_ms(state(), np.array([float(tokens)]))
    assert taken.tolist() == pytest.approx([ms])
    assert np.broadcast_to(count, 1).tolist() == [pieces]


def test_in_time_and_at_pace_only_the_prices_are_left() -> None:
    assert own(prompt_ms=100) == pytest.approx(0.05 * PREFILL_PRICE + 0.4 * DECODE_PRICE, abs=0.001)


def test_the_time_of_a_faster_engine_is_worth_more() -> None:
    assert own(prompt_ms=100, speed=4) == pytest.approx(4 * 0.05 * PREFILL_PRICE + 2 * 0.4 * DECODE_PRICE, abs=0.001)
    assert own(prompt_ms=100 / 4, after_ms=10 / 4, speed=4) < own(prompt_ms=100), "but with room at both it is chosen"


def test_worth_is_speed_next_to_the_mean_of_those_that_may_be_chosen() -> None:
    engines = State(**{name: np.repeat(values, 4) for name, values in state()._asdict().items()})
    engines = engines._replace(piece_ms=np.array([50.0, 100.0, 100.0, 1.0]))
    shares = worth(engines, np.array([True, True, True, False]))
    assert shares[:3].tolist() == pytest.approx([1.5, 0.75, 0.75])
    assert worth(state(), np.array([True])).tolist() == [1.0]


def test_late_is_lost_whatever_made_it_late() -> None:
    at_ease = own(prompt_ms=100)
    for cause in ({"waited_ms": 2_500.0}, {"backlog_ms": 2_500.0}, {"slot_ms": 2_500.0}):
        assert own(prompt_ms=100, **cause) == pytest.approx(at_ease + 1, abs=0.02)
    assert own(waited_ms=1_990.0) == pytest.approx(0.5 + 0.4 * DECODE_PRICE, abs=0.01), "10 ms of decoding come between"


def test_slower_than_the_pace_is_lost() -> None:
    assert own(after_ms=30) == pytest.approx(1 + CALM * DECODE_PRICE, abs=0.01)
    assert own(after_ms=24) == pytest.approx(CALM * DECODE_PRICE, abs=0.01)


def test_who_is_far_ahead_bears_a_prompt() -> None:
    assert others([500, 900], 300) == 0


def test_who_has_just_begun_misses_it_if_few_tokens_are_left() -> None:
    # 300 ms behind, 15 ms a token to gain: 20 tokens; so many answers are shorter
    lengths = Lengths()
    assert others([0], 300) == pytest.approx(lengths.shorter(20 + BUCKET_TOKENS / 2))
    assert others([0, 0, 0], 300) == pytest.approx(3 * others([0], 300))
    assert others([], 300, waiting=2) == pytest.approx(2 * others([0], 300))


def test_a_slower_step_makes_it_longer_to_catch_up() -> None:
    assert others([-300], 0, before=10, after=20) > 0
    assert others([-300], 0, before=10, after=10) == 0


def test_an_engine_that_gets_slower_than_the_pace_loses_who_will_run_out_of_slack() -> None:
    # 100 ms ahead and 5 ms lost a token: 20 tokens last; whoever has more left falls behind
    lengths = Lengths()
    lost = others([100], 0, before=10, after=30)
    assert lost == pytest.approx(1 - lengths.shorter(20 + BUCKET_TOKENS / 2))
    assert others([-50], 0, before=30, after=40) == 0, "it is behind already, and stays so"


@given(
    st.lists(st.floats(-5_000, 5_000), max_size=8),
    st.floats(0, 20_000),
    st.floats(0.1, 100),
    st.floats(0, 50),
    st.floats(0, 30),
)
def test_others_never_gain_and_no_more_can_be_lost_than_there_are(
    slacks: list[float], prompt_ms: float, before: float, slower: float, waiting: float
) -> None:
    lost = others(slacks, prompt_ms, before=before, after=before + slower, waiting=waiting)
    assert -1e-9 <= lost <= len(slacks) + waiting + 1e-9
