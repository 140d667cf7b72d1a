"""The cache of a simulated engine: what is found, what makes room, and that no block is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from routing.simulator.cache import WHOLE, Cache


def used(cache: Cache, prefix: tuple[int, ...], blocks: int) -> None:
    """A prompt is computed, and its request ends."""
    pinned = -(-min(cache.match(prefix) // 64, blocks) // WHOLE)
    cache.pin(prefix[:pinned])
    cache.unpin(prefix[: cache.fill(prefix, pinned, blocks)])


def test_what_was_computed_is_found_up_to_the_first_gap() -> None:
    cache = Cache(100)
    used(cache, (1, 2, 3), 20)
    assert cache.match((1, 2, 3)) == 20 * 64  # 8 + 8 + 4 blocks
    assert cache.match((1, 2, 9)) == 16 * 64
    assert cache.match((7, 2, 3)) == 0
    assert (cache.free, cache.room) == (80, 100)


def test_the_end_of_the_prompt_that_was_used_longest_ago_goes_first() -> None:
    cache = Cache(32)
    used(cache, (1, 2), 16)
    used(cache, (3,), 8)
    used(cache, (4, 5), 12)  # 8 are free: of (1, 2), piece 2 gives up its last 4
    assert cache.match((1, 2)) == 12 * 64
    used(cache, (1, 2), 16)  # used again, 4 computed anew: those of (3,)
    assert cache.match((3,)) == 4 * 64
    assert cache.match((1, 2)) == 16 * 64


def test_what_is_in_use_stays() -> None:
    cache = Cache(24)
    pieces = cache.fill((1, 2), 0, 16)
    used(cache, (3,), 8)
    used(cache, (4,), 8)
    assert (cache.match((1, 2)), cache.match((3,)), cache.match((4,))) == (1024, 0, 512)
    cache.unpin((1, 2)[:pieces])
    assert cache.room == 24


def test_two_that_share_a_prompt_hold_it_once() -> None:
    cache = Cache(24)
    cache.fill((1,), 0, 8)
    cache.pin((1,))
    cache.fill((1, 2), 1, 16)
    assert cache.free == 8
    cache.unpin((1,))
    assert cache.room == 8
    cache.unpin((1, 2))
    assert cache.room == 24


def test_a_piece_that_another_has_computed_meanwhile_is_pinned_and_not_taken_again() -> None:
    cache = Cache(24)
    first, second = cache.fill((1,), 0, 4), cache.fill((1, 2), 0, 16)
    assert cache.free == 8
    cache.unpin((1,)[:first])
    cache.unpin((1, 2)[:second])
    assert cache.room == 24


def test_changes_are_told_to_who_wants_to_know() -> None:
    cache = Cache(16)
    used(cache, (1,), 8)
    assert cache.changed is None
    cache.changed = {}
    used(cache, (2, 3), 16)
    assert cache.changed == {1: False, 2: True, 3: True}
    used(cache, (1,), 4)  # a piece that isn't whole isn't told of; that of which it took a part is gone
    assert cache.changed == {1: False, 2: True, 3: False}


def test_spent_blocks_make_room_first_among_equals_and_are_never_found() -> None:
    cache = Cache(16)
    cache.take(4)
    cache.leave(4)
    assert (cache.free, cache.room) == (12, 16)
    cache.leave(0)
    used(cache, (1, 2), 16)
    assert cache.match((1, 2)) == 1024


prompts = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, WHOLE), st.booleans()), min_size=1, max_size=40
)


@given(prompts)
def test_blocks_never_leak(prompts: list[tuple[int, int, int, bool]]) -> None:
    cache = Cache(120)
    open_: list[tuple[int, ...]] = []
    for family, pieces, last, stays in prompts:
        prefix = tuple(family * 10 + place for place in range(pieces))
        blocks = (pieces - 1) * WHOLE + last
        if cache.room < blocks + WHOLE:
            continue
        pinned = -(-min(cache.match(prefix) // 64, blocks) // WHOLE)
        cache.pin(prefix[:pinned])
        prefix = prefix[: cache.fill(prefix, pinned, blocks)]
        if stays:
            open_.append(prefix)
        else:
            cache.unpin(prefix)
        assert 0 <= cache.free <= cache.room <= 120
    for prefix in open_:
        cache.unpin(prefix)
    assert cache.room == 120
    cache.take(120)
    assert cache.free == 0
