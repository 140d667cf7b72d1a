"""Which member gets which partitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wire.assign import spread

holdings = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=2), st.frozensets(st.integers(0, 15), max_size=10), min_size=1, max_size=6
)


def test_nobody_gets_nothing() -> None:
    assert spread(range(4), {}) == {}


def test_the_first_member_gets_all_and_a_second_one_half() -> None:
    assert spread(range(4), {"a": ()}) == {"a": frozenset({0, 1, 2, 3})}
    assert spread(range(4), {"a": range(4), "b": ()}) == {"a": frozenset({0, 1}), "b": frozenset({2, 3})}


def test_who_holds_more_keeps_the_odd_one() -> None:
    assert spread(range(5), {"a": (0, 1), "b": (2, 3, 4)}) == {"a": frozenset({0, 1}), "b": frozenset({2, 3, 4})}


def test_of_two_claims_the_larger_holder_keeps() -> None:
    assert spread(range(4), {"a": (1,), "b": (0, 1)}) == {"a": frozenset({2, 3}), "b": frozenset({0, 1})}


@given(st.integers(0, 16), holdings)
def test_each_number_goes_to_one_member_and_counts_differ_by_one_at_most(
    total: int, held: dict[str, frozenset[int]]
) -> None:
    shares = spread(range(total), held)
    assert sorted(n for share in shares.values() for n in share) == list(range(total))
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1
    assert spread(range(total), shares) == shares, "nothing moves without need"


@given(st.integers(1, 16), st.integers(1, 6))
def test_one_more_member_takes_only_its_own_share_away(total: int, members: int) -> None:
    before = spread(range(total), {f"m{i}": () for i in range(members)})
    after = spread(range(total), {**before, "new": ()})
    for name, share in before.items():
        assert after[name] <= share
