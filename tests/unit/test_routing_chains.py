"""Which engine has which prompt's beginning: reported, or hoped for because it was just sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import chains
from routing.chains import HOPE_MS, HOPES, Chains

CHAIN = (1, 2, 3, 4)


def test_the_longest_beginning_counts() -> None:
    known = Chains()
    known.report(0, (1, 2), (), full=True)
    known.report(1, (1, 2, 3, 4, 5), (), full=True)
    known.report(2, (2, 3), (), full=True)  # without the first link nothing of the rest is this prompt's
    assert known.matches(CHAIN, 4) == [2, 4, 0, 0]
    assert [known.match(engine, CHAIN) for engine in range(4)] == [2, 4, 0, 0]
    assert known.matches((), 4) == [0, 0, 0, 0]


def test_changes_and_whole_sets() -> None:
    known = Chains()
    known.report(0, (1, 2, 3), (), full=False)
    known.report(0, (4,), (3,), full=False)
    assert known.match(0, CHAIN) == 2
    known.report(0, (), (), full=False)
    assert known.match(0, CHAIN) == 2
    known.report(0, (1,), (), full=True)
    assert known.match(0, CHAIN) == 1
    known.report(0, (), (), full=True)
    assert (known.match(0, CHAIN), len(known)) == (0, 0)


def test_what_was_sent_is_hoped_for_until_it_should_have_been_reported() -> None:
    known = Chains()
    known.report(0, (), (), full=True)
    known.hope(0, CHAIN, 0)
    known.hope(0, (1, 2), 100)
    assert known.match(0, CHAIN) == 4
    known.report(0, (1,), (), full=False)
    known.hope(0, (), HOPE_MS + 50)
    assert known.match(0, CHAIN) == 2, "the second send is still young"
    known.hope(0, (9,), HOPE_MS + 150)
    assert known.match(0, CHAIN) == 1, "what is reported stays"


def test_an_engine_that_reports_nothing_keeps_nothing() -> None:
    known = Chains()
    known.hope(0, CHAIN, 0)
    assert known.match(0, CHAIN) == 0


def test_a_new_life_has_nothing() -> None:
    known = Chains()
    known.report(0, CHAIN, (), full=True)
    known.report(1, CHAIN[:1], (), full=True)
    known.hope(0, (7, 8), 0)
    known.forget(0)
    assert known.matches(CHAIN, 2) == [0, 1]
    assert known.match(0, (7, 8)) == 0
    known.hope(1, (5,), HOPE_MS + 1)  # what was hoped of the former life expires unnoticed
    assert len(known) == 2


def test_what_is_evicted_while_it_is_sent_again_is_still_hoped_for() -> None:
    known = Chains()
    known.report(0, CHAIN, (), full=True)
    known.hope(0, CHAIN, 0)
    known.report(0, (), CHAIN, full=False)
    assert known.match(0, CHAIN) == 4


def test_a_million_different_prompts_reach_a_plateau() -> None:
    known = Chains()
    known.report(0, (), (), full=True)
    sizes = []
    for n in range(20 * HOPES):
        known.hope(0, (2 * n, 2 * n + 1), float(n % 3))
        if n % HOPES == HOPES - 1:
            sizes.append(len(known))
    assert sizes[2:] == [sizes[2]] * 18
    assert sizes[2] <= 2 * HOPES + 2


def test_no_report_is_believed_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MAX_LINKS", 3)
    known = Chains()
    known.report(0, CHAIN, (), full=True)
    assert (known.match(0, CHAIN), len(known)) == (3, 3)


links = st.lists(st.integers(0, 12), max_size=5).map(tuple)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["report", "full", "hope", "forget"]),
            st.integers(0, 2),
            links,
            links,
            st.sampled_from([0.0, 1.0, HOPE_MS / 2, HOPE_MS + 1]),
        ),
        max_size=40,
    ),
    links,
)
def test_all_engines_at_once_are_each_alone(
    said: list[tuple[str, int, tuple[int, ...], tuple[int, ...], float]], chain: tuple[int, ...]
) -> None:
    known, now_ms = Chains(), 0.0
    for what, engine, added, evicted, passed_ms in said:
        now_ms += passed_ms
        if what == "hope":
            known.hope(engine, added, now_ms)
        elif what == "forget":
            known.forget(engine)
        else:
            known.report(engine, added, evicted, full=what == "full")
        assert known.matches(chain, 3) == [known.match(number, chain) for number in range(3)]
    for engine in range(3):
        known.forget(engine)
    known.hope(0, (), now_ms + 3 * HOPE_MS)
    assert len(known) == 0
