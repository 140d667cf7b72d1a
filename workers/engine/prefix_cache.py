"""Which beginnings of prompts an engine still has computed: an index of blocks. Pure; `block_store` holds the numbers.

A block is a whole piece of a prompt: `block_tokens` tokens from a multiple of that on, computed as a piece. Its numbers
follow from the tokens up to its end and from nothing else, because pieces begin at fixed positions and everything
before it was computed in the same pieces. So whoever loads a block has, bit for bit, what it would have computed. What
was generated was computed token by token, perhaps to other bits, and is never kept.

A block is named by a hash of its tenant and all tokens up to its end, but found only if it is of that tenant, has these
tokens, and continues the block that was found before it: a collision is a miss, and no tenant can tell by the time an
answer takes what another one asked.

Blocks go the longest unused first, and none before those that continue it, nor while a step reads or writes it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

MAX_LINKS = 8
"""of one block: 64 tokens of long words are two links; requests that differ in what the prompt doesn't show add more"""
Tokens = tuple[int, ...]
Namer = Callable[[bytes, bytes], bytes]


def blake(before: bytes, data: bytes) -> bytes:
    """A name that continues another."""
    return hashlib.blake2b(before + data, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt as the cache sees it: its whole blocks in order."""

    tenant: str
    tokens: tuple[Tokens, ...]
    names: tuple[bytes, ...]
    links: tuple[tuple[int, ...], ...]
    """by block: the links of the request's prefix chain whose text ends in it"""


@dataclass(slots=True, eq=False)
class _Block:
    tenant: str
    tokens: Tokens
    before: _Block | None
    storage: int
    computed: bool = False
    """false while the step that computes it runs"""
    continued: int = 0
    """blocks that continue it"""
    links: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Found:
    """What of a prompt is there, from a block on."""

    storages: tuple[int, ...]
    coming: bool
    """the block after these is being computed in this step, for another prompt"""


class PrefixCache:
    """An index over `blocks` places in a store; place numbers run from 0."""

    def __init__(self, blocks: int, block_tokens: int, *, name: Namer = blake) -> None:
        self.block_tokens = block_tokens
        self._capacity = blocks
        self._name = name
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        """the longest unused first; a block is never younger than the one it continues"""
        self._free = list(range(blocks - 1, -1, -1))
        self._held: list[_Block] = []
        """read or written by the step that runs"""
        self._carriers: dict[int, int] = {}
        """link → blocks that have it"""
        self._changed: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def chain(self, tenant: str, prompt: Tokens, links: Iterable[tuple[int, int]] = ()) -> Chain:
        """`links`: (link, tokens of the prompt that hold all its text), for the signals."""
        size = self.block_tokens
        count = len(prompt) // size if self._capacity else 0
        tokens = tuple(prompt[at * size : (at + 1) * size] for at in range(count))
        names, name = [], self._name(b"", tenant.encode("utf-8", "surrogatepass"))
        for block in tokens:
            name = self._name(name, array("q", block).tobytes())
            names.append(name)
        ending: list[list[int]] = [[] for _ in range(count)]
        for link, needed in links:
            at = max(0, needed - 1) // size
            if at < count:
                ending[at].append(link)
        return Chain(tenant, tokens, tuple(names), tuple(map(tuple, ending)))

    def likely(self, chain: Chain) -> int:
        """How many of its first blocks are there, by their names: an estimate, for planning."""
        for count, name in enumerate(chain.names):
            if name not in self._blocks:
                return count
        return len(chain.names)

    def find(self, chain: Chain, begin: int, end: int) -> Found:
        """The blocks from `begin` on that are there, in a row; at most up to `end`, exclusive."""
        walked = self._walk(chain)[:end]
        storages: list[int] = []
        for block in walked[begin:]:
            if not block.computed:
                return Found(tuple(storages), coming=True)
            storages.append(block.storage)
        return Found(tuple(storages), coming=False)

    def hold(self, chain: Chain, begin: int, end: int) -> None:
        """A step reads these blocks: they stay at least until `settle`, and count as used now."""
        walked = self._walk(chain)[:end]
        self._held += walked[begin:]
        for block, links in zip(walked, chain.links, strict=False):
            self._attach(block, links)
        self._touch(chain, len(walked))

    def put(self, chain: Chain, index: int) -> int | None:
        """Where the block that this step computes shall be stored; None if it is there, or can't be kept."""
        walked = self._walk(chain)
        if len(walked) != index or index == len(chain.names) or chain.names[index] in self._blocks:
            return None
        before = walked[-1] if walked else None
        storage = self._free.pop() if self._free else self._evict(sparing=before)
        if storage is None:
            return None
        block = _Block(chain.tenant, chain.tokens[index], before, storage)
        self._blocks[chain.names[index]] = block
        if before is not None:
            before.continued += 1
        self._held.append(block)
        self._attach(block, chain.links[index])
        self._touch(chain, index)
        return storage

    def settle(self) -> None:
        """The step has run: what it wrote can be found, and what it held may go."""
        for block in self._held:
            block.computed = True
        self._held.clear()

    def changes(self) -> tuple[list[int], list[int]]:
        """Links added and evicted since the last call."""
        changed, self._changed = self._changed, {}
        added = [link for link in changed if link in self._carriers]
        return added, [link for link in changed if link not in self._carriers]

    def _walk(self, chain: Chain) -> list[_Block]:
        """The blocks that are there, from the first on, compared by what they are and not by their names alone."""
        walked: list[_Block] = []
        before = None
        for name, tokens in zip(chain.names, chain.tokens, strict=True):
            block = self._blocks.get(name)
            if block is None or block.before is not before or block.tokens != tokens or block.tenant != chain.tenant:
                break
            walked.append(block)
            before = block
        return walked

    def _touch(self, chain: Chain, count: int) -> None:
        for name in reversed(chain.names[:count]):
            self._blocks.move_to_end(name)

    def _evict(self, sparing: _Block | None) -> int | None:
        held = {id(block) for block in (*self._held, sparing) if block is not None}
        for name, block in self._blocks.items():
            if not block.continued and id(block) not in held:
                del self._blocks[name]
                if block.before is not None:
                    block.before.continued -= 1
                self._detach(block.links)
                return block.storage
        return None

    def _attach(self, block: _Block, links: Sequence[int]) -> None:
        for link in links:
            if link not in block.links and len(block.links) < MAX_LINKS:
                block.links.append(link)
                self._carriers[link] = self._carriers.get(link, 0) + 1
                if self._carriers[link] == 1:
                    self._changed[link] = None

    def _detach(self, links: Iterable[int]) -> None:
        for link in links:
            self._carriers[link] -= 1
            if not self._carriers[link]:
                del self._carriers[link]
                self._changed[link] = None
