"""Pages never leak, never have two writers, and never run out for what admission allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from engine_world import LIMITS, make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.gpu.pages import PAGE_TOKENS, SCRATCH, PageCopy, Pages, PagesExhausted, kv_tokens, pages_of
from workers.engine.scheduler import Scheduler
from workers.engine.simulated_vocabulary import SimulatedVocabulary

SLOTS = 5
CONTEXT = 4 * PAGE_TOKENS
ALL = SLOTS * 4 + 2
"""pages: of the slots, and of two blocks of the prefix cache"""
slots = st.integers(0, SLOTS - 1)
tokens = st.integers(1, CONTEXT)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("reach"), slots, tokens),
        st.tuples(st.just("release"), slots),
        st.tuples(st.just("copy"), slots, slots),
        st.tuples(st.just("save"), slots, st.integers(0, 1), st.integers(0, 3)),
        st.tuples(st.just("load"), slots, st.integers(0, 1)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(actions)
def test_whatever_happens_pages_are_held_or_free_and_each_slot_writes_its_own(steps: list[tuple]) -> None:
    pages = Pages(ALL + 1, slots=SLOTS, context_tokens=CONTEXT)
    lengths, blocks = [0] * SLOTS, {}
    for name, slot, *more in steps:
        if name == "reach":
            lengths[slot] = max(lengths[slot], more[0])
            pages.reach(slot, lengths[slot])
        elif name == "release":
            pages.release((slot,))
            lengths[slot] = 0
        elif name == "save" and lengths[slot] >= (more[1] + 1) * PAGE_TOKENS:
            pages.save(more[0], slot, more[1] * PAGE_TOKENS)
            blocks[more[0]] = pages.held(slot)[more[1]]
        elif name == "load" and more[0] in blocks:
            pages.release((slot,))
            pages.load(slot, (more[0],))
            lengths[slot] = PAGE_TOKENS
            assert pages.held(slot) == (blocks[more[0]],)
        elif name == "copy" and more[0] != slot and lengths[slot]:
            pages.copy(slot, more[0], lengths[slot])
            lengths[more[0]] = lengths[slot]
        _check(pages, lengths, list(blocks.values()))
    pages.release(range(SLOTS))
    assert pages.free == ALL - len(set(blocks.values()))


def _check(pages: Pages, lengths: list[int], blocks: list[int]) -> None:
    held = [pages.held(slot) for slot in range(SLOTS)]
    holders = Counter([*(page for mine in held for page in mine), *blocks])
    assert SCRATCH not in holders
    assert len(holders) + pages.free == ALL
    for slot, mine in enumerate(held):
        assert len(mine) == pages_of(lengths[slot])
        assert list(pages.table[slot, : len(mine)]) == list(mine)
        assert not pages.table[slot, len(mine) :].any()
        if lengths[slot] % PAGE_TOKENS:
            assert holders[mine[-1]] == 1, "the page that is written to next has another reader"


def test_a_copy_shares_full_pages_and_names_the_one_to_be_copied() -> None:
    pages = Pages(9, slots=2, context_tokens=CONTEXT)
    pages.reach(0, 2 * PAGE_TOKENS + 10)
    copied = pages.copy(0, 1, 2 * PAGE_TOKENS + 10)
    assert pages.held(1)[:2] == pages.held(0)[:2]
    assert copied == PageCopy(source=pages.held(0)[2], target=pages.held(1)[2])
    assert copied.source != copied.target
    assert pages.free == 8 - 4
    assert pages.copy(0, 1, 2 * PAGE_TOKENS) is None
    assert pages.held(1) == pages.held(0)[:2]


def test_a_cache_that_is_too_small_says_so() -> None:
    pages = Pages(2, slots=1, context_tokens=CONTEXT)
    pages.reach(0, PAGE_TOKENS)
    with pytest.raises(PagesExhausted, match="no page left"):
        pages.reach(0, PAGE_TOKENS + 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 30), st.integers(1, 8), st.lists(tokens, min_size=1, max_size=8))
def test_what_may_be_promised_always_fits(pages: int, slots: int, lengths: list[int]) -> None:
    """Each slot takes (t + 255) // 256 pages; the promise leaves 255 tokens a slot for that."""
    promised = kv_tokens(pages, slots, CONTEXT)
    running = lengths[:slots]
    if sum(running) <= promised:
        assert sum(map(pages_of, running)) <= pages - 1


def test_with_a_context_for_every_slot_all_of_it_is_promised() -> None:
    assert kv_tokens(4 * 3 + 1, 3, CONTEXT - 1) == 3 * (CONTEXT - 1)
    assert kv_tokens(4 * 3, 3, CONTEXT) == 11 * PAGE_TOKENS - 3 * (PAGE_TOKENS - 1)
    assert kv_tokens(1, 3, CONTEXT) == 0


def test_a_scheduler_tells_each_slot_that_ended_once() -> None:
    mine = Scheduler(replace(LIMITS, slots=4), SimulatedVocabulary())
    for ref, n in ((1, 1), (2, 2), (3, 1)):
        mine.add(make_sequence(ref, n=n))
    mine.admit()
    by_request = {g.sequence.key.ref: g.slot for g in mine.running()}
    assert mine.freed() == []
    mine.cancel(make_sequence(2).key)
    mine.end(next(g for g in mine.running() if g.sequence.key.ref == 3))
    freed = mine.freed()
    assert len(freed) == len(set(freed)) == 3
    assert by_request[1] not in freed
    assert by_request[3] in freed
    assert mine.freed() == []


def test_the_table_is_of_the_kernels_type() -> None:
    assert Pages(3, slots=2, context_tokens=1).table.dtype == np.int32
