"""The index of the prefix cache: what is found, what goes first, and that nothing is lost or shared."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.prefix_cache import MAX_LINKS, Chain, PrefixCache

SIZE = 4


def tokens(*blocks: int) -> tuple[int, ...]:
    """A prompt of whole blocks, each of the same token."""
    return tuple(block for block in blocks for _ in range(SIZE))


def compute(cache: PrefixCache, chain: Chain) -> tuple[int, ...]:
    """What an engine does with a whole prompt in one step; where its blocks came from or went."""
    end = len(chain.names)
    found = cache.find(chain, 0, end)
    cache.hold(chain, 0, len(found.storages))
    put = [cache.put(chain, index) for index in range(len(found.storages), end)]
    cache.settle()
    return (*found.storages, *(storage for storage in put if storage is not None))


def there(cache: PrefixCache, tenant: str, *blocks: int) -> int:
    """How many of a prompt's blocks are found."""
    return len(cache.find(cache.chain(tenant, tokens(*blocks)), 0, len(blocks)).storages)


def test_what_was_computed_is_found_as_far_as_prompts_are_alike() -> None:
    cache = PrefixCache(8, SIZE)
    compute(cache, cache.chain("a", tokens(1, 2, 3)))
    assert [there(cache, "a", *blocks) for blocks in ((1, 2, 3), (1, 2, 9), (1, 2, 3, 4), (2, 3), ())] == [
        3,
        2,
        3,
        0,
        0,
    ]
    assert cache.likely(cache.chain("a", tokens(1, 2, 9))) == 2


def test_only_whole_blocks_count() -> None:
    cache = PrefixCache(8, SIZE)
    assert len(cache.chain("a", (1,) * (2 * SIZE - 1)).names) == 1


def test_tenants_share_nothing() -> None:
    cache = PrefixCache(8, SIZE)
    compute(cache, cache.chain("a", tokens(1, 2)))
    assert there(cache, "b", 1, 2) == 0
    assert set(compute(cache, cache.chain("b", tokens(1, 2)))).isdisjoint({0, 1})


def test_what_a_step_computes_is_coming_until_it_has_run() -> None:
    cache = PrefixCache(8, SIZE)
    chain = cache.chain("a", tokens(1, 2))
    assert cache.put(chain, 0) == 0
    assert cache.find(chain, 0, 2).coming
    assert cache.put(chain, 0) is None
    cache.settle()
    found = cache.find(chain, 0, 2)
    assert (found.storages, found.coming) == ((0,), False)


def test_a_block_without_the_one_before_it_is_not_kept() -> None:
    cache = PrefixCache(8, SIZE)
    assert cache.put(cache.chain("a", tokens(1, 2)), 1) is None
    assert len(cache) == 0


def test_the_longest_unused_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    cache = PrefixCache(4, SIZE)
    compute(cache, cache.chain("a", tokens(1, 2)))
    compute(cache, cache.chain("a", tokens(3, 4)))
    compute(cache, cache.chain("a", tokens(1, 5)))  # uses 1, needs room: 2 is the oldest that nothing continues
    assert [there(cache, "a", *blocks) for blocks in ((1, 2), (1, 5), (3, 4))] == [1, 2, 2]


def test_what_a_step_holds_stays() -> None:
    cache = PrefixCache(2, SIZE)
    old = cache.chain("a", tokens(1))
    compute(cache, old)
    cache.hold(old, 0, 1)
    new = cache.chain("a", tokens(2, 3, 4))
    assert [cache.put(new, index) for index in range(3)] == [1, None, None]
    cache.settle()
    assert (there(cache, "a", 1), there(cache, "a", 2, 3)) == (1, 1)


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    cache = PrefixCache(3, SIZE)
    chain = cache.chain("a", tokens(*range(6)))
    for index in range(6):
        cache.put(chain, index)
        cache.settle()
    assert there(cache, "a", *range(6)) == 3


def test_without_room_nothing_is_kept_and_nothing_breaks() -> None:
    cache = PrefixCache(0, SIZE)
    chain = cache.chain("a", tokens(1, 2), [(7, 4)])
    assert compute(cache, chain) == ()
    assert cache.changes() == ([], [])


def test_a_link_is_told_with_the_block_that_ends_its_text_and_taken_back_with_the_last_of_them() -> None:
    cache = PrefixCache(3, SIZE)
    compute(cache, cache.chain("a", tokens(1, 2), [(11, 3), (12, 4), (13, 5), (14, 9)]))
    assert cache.changes() == ([11, 12, 13], [])
    compute(cache, cache.chain("b", tokens(1), [(11, 3)]))  # one more block that has link 11
    compute(cache, cache.chain("a", tokens(7, 8)))
    assert cache.changes() == ([], [13, 12])
    compute(cache, cache.chain("c", tokens(5)))
    assert cache.changes() == ([], [11])


def test_a_hit_adds_the_links_that_its_own_request_knows() -> None:
    cache = PrefixCache(3, SIZE)
    compute(cache, cache.chain("a", tokens(1)))
    compute(cache, cache.chain("a", tokens(1), [(11, 4)]))
    assert cache.changes() == ([11], [])
    for link in range(100, 200):
        compute(cache, cache.chain("a", tokens(1), [(link, 4)]))
    assert len(cache.changes()[0]) == MAX_LINKS - 1


PROMPTS = st.lists(st.integers(0, 2), min_size=0, max_size=6).map(lambda blocks: tokens(*blocks))
PLANS = st.lists(st.lists(st.tuples(st.sampled_from("ab"), PROMPTS), max_size=4), max_size=30)


class Engine:
    """What a runner would hold: the tokens up to each block's end, by place; and which places a step touches."""

    def __init__(self, blocks: int, name: object = None) -> None:
        self.cache = PrefixCache(blocks, SIZE) if name is None else PrefixCache(blocks, SIZE, name=name)  # type: ignore[arg-type]
        self.places = blocks
        self.store: dict[int, tuple[str, tuple[int, ...]]] = {}

    def step(self, prompts: list[tuple[str, tuple[int, ...]]]) -> None:
        read, written = list[int](), dict[int, tuple[str, tuple[int, ...]]]()
        for tenant, prompt in prompts:
            chain = self.cache.chain(
                tenant, prompt, [(hash((tenant, prompt[:end])), end) for end in range(len(prompt))]
            )
            found = self.cache.find(chain, 0, len(chain.names))
            for at, place in enumerate(found.storages):
                assert self.store[place] == (tenant, prompt[: (at + 1) * SIZE]), "a hit gives what would be computed"
            self.cache.hold(chain, 0, len(found.storages))
            read += found.storages
            for index in range(len(found.storages), len(chain.names)):
                if (place := self.cache.put(chain, index)) is not None:
                    assert place not in written
                    assert 0 <= place < self.places
                    written[place] = (tenant, prompt[: (index + 1) * SIZE])
        assert not set(read) & set(written), "what a step reads stays until it has run"
        self.store |= written
        self.cache.settle()

    def links(self) -> Iterator[int]:
        for block in self.cache._blocks.values():
            yield from block.links


@given(PLANS, st.integers(0, 5), st.sampled_from([None, lambda _before, _data: b"same", lambda before, data: data[:1]]))
def test_a_hit_is_always_what_would_be_computed_and_no_place_is_lost(
    plans: list[list[tuple[str, tuple[int, ...]]]], blocks: int, name: object
) -> None:
    """Whatever comes, and however badly names are made."""
    engine = Engine(blocks, name)
    known: set[int] = set()
    for plan in plans:
        engine.step(plan)
        cache = engine.cache
        held = [block.storage for block in cache._blocks.values()]
        assert sorted(held + cache._free) == list(range(blocks)), "each place is free or has one block"
        alive = set(map(id, cache._blocks.values()))
        assert all(block.before is None or id(block.before) in alive for block in cache._blocks.values())
        added, evicted = cache.changes()
        known = (known | set(added)) - set(evicted)
        assert known == set(engine.links()), "told is what is there"


def test_memory_stays_whatever_comes() -> None:
    cache = PrefixCache(16, SIZE)
    for number in range(10_000):
        compute(cache, cache.chain(f"t{number % 7}", (number,) * SIZE, [(number, 4)]))
        cache.changes()
    assert (len(cache), len(cache._carriers), len(cache._changed)) == (16, 16, 0)
