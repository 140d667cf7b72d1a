"""How long answers get, and the few numbers that stand for many slacks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.lengths import BUCKET_TOKENS, BUCKETS, PRIOR_TOKENS, REFRESH, Lengths
from routing.slack import STANDINS, standins


def test_at_first_lengths_are_what_is_usual() -> None:
    lengths = Lengths()
    assert lengths.shorter(0) == 0
    assert lengths.shorter(PRIOR_TOKENS) == pytest.approx(1 - 0.3679, abs=0.01)
    assert lengths.mean_tokens == pytest.approx(PRIOR_TOKENS, rel=0.05)


def test_what_ended_is_learned() -> None:
    lengths = Lengths()
    lengths.extend([100] * 900 + [1_000] * 100)
    assert lengths.shorter(160) == pytest.approx(0.88, abs=0.03)
    assert lengths.mean_tokens == pytest.approx(190, rel=0.1)


def test_it_is_looked_at_now_and_then() -> None:
    lengths = Lengths()
    before = lengths.mean_tokens
    for _ in range(REFRESH - 1):
        lengths.add(4_000)
    assert lengths.mean_tokens == before
    lengths.add(4_000)
    assert lengths.mean_tokens > before


def test_an_old_answer_is_forgotten() -> None:
    lengths = Lengths()
    lengths.extend([3_000] * 2_000)
    for _ in range(20):
        lengths.extend([50] * 2_000)
    assert lengths.mean_tokens == pytest.approx(56, rel=0.1), "the middle of its bucket"


@given(st.lists(st.integers(-5, 10**9), max_size=50))
def test_shares_rise_from_none_to_all(ended: list[int]) -> None:
    lengths = Lengths()
    lengths.extend(ended)
    table = lengths.table.tolist()
    assert table[0] == 0
    assert table[-1] == 1
    assert table == sorted(table)
    assert lengths.shorter(BUCKETS * BUCKET_TOKENS * 10) == 1


@given(st.lists(st.floats(-1e6, 1e6), max_size=300))
def test_few_slacks_stand_for_all(slacks: list[float]) -> None:
    few = standins(slacks)
    assert len(few) == min(len(slacks), STANDINS)
    assert list(few) == sorted(few)
    if slacks:
        assert min(slacks) - 1 <= few[0] <= few[-1] <= max(slacks) + 1
        if len(slacks) % STANDINS == 0:
            assert sum(few) / len(few) == pytest.approx(sum(slacks) / len(slacks), abs=1)


def test_few_are_themselves() -> None:
    assert standins([30.4, -10]) == (-10, 30)
    assert standins([]) == ()
