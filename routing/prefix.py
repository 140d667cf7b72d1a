"""Which prompts begin alike, told by numbers alone.

A prompt's text is cut into blocks; each block's hash continues the hash of all before it. Two prompts of one tenant
that share their first k blocks share the first k numbers of their chains, and an engine that has the one's key/value
cache can skip that much of the other's prefill. The tenant salts the chain: no tenant's numbers say anything about
another's prompts. 64 bits stand for 256 characters, so no text can be read back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mmh3

BLOCK_CHARS = 256
CHARS_PER_TOKEN = 4
"""of a prompt that nobody has tokenised yet"""
BLOCK_TOKENS = BLOCK_CHARS // CHARS_PER_TOKEN
MAX_BLOCKS = 64
"""16,384 characters; what prompts share beyond that is rarely worth its bytes in every request"""


def prefix_chain(
    tenant: str,
    model: str,
    messages: Sequence[Mapping[str, Any]] = (),
    prompt: str | Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Chained 64-bit hashes of the prompt's full blocks, at most MAX_BLOCKS; empty for a prompt under one block.

    Pure: the same arguments give the same chain in every process, whatever the order of a message's keys.
    """
    link = _hash(json.dumps([tenant, model]).encode(), 0)
    chain = []
    for block in _blocks(text for text, _ in pieces(messages, prompt)):
        link = _hash(block.encode("utf-8", "surrogatepass"), link)
        chain.append(link)
    return tuple(chain)


def match_blocks(chain: Sequence[int], known: frozenset[int] | set[int]) -> int:
    """How many of a chain's first blocks are known. A link names all before it, so membership is enough."""
    for count, link in enumerate(chain):
        if link not in known:
            return count
    return len(chain)


def _hash(data: bytes, before: int) -> int:
    return int(mmh3.hash64(before.to_bytes(8, "big") + data, signed=False)[0])


def pieces(
    messages: Sequence[Mapping[str, Any]], prompt: str | Sequence[int] | None = None
) -> Iterator[tuple[str, bool]]:
    """The text that is cut into blocks, and whether a model reads it as it stands (apart from space around it)."""
    if isinstance(prompt, str):
        yield prompt, True
    elif prompt is not None:
        yield from ((f"{token},", False) for token in prompt)
    for message in messages:
        yield f"\x1e{message.get('role')}\x1f", False
        rest = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
        if rest:
            yield json.dumps(rest, sort_keys=True), False
        content = message.get("content")
        yield (content, True) if isinstance(content, str) else (json.dumps(content, sort_keys=True), False)


def _blocks(pieces: Iterator[str]) -> Iterator[str]:
    """Full blocks of the pieces joined; reads no more pieces than it needs."""
    held: list[str] = []
    held_chars = blocks = 0
    for piece in pieces:
        held.append(piece)
        held_chars += len(piece)
        if held_chars < BLOCK_CHARS:
            continue
        text = "".join(held)
        start = 0
        while held_chars - start >= BLOCK_CHARS:
            if blocks == MAX_BLOCKS:
                return
            yield text[start : start + BLOCK_CHARS]
            start += BLOCK_CHARS
            blocks += 1
        held, held_chars = [text[start:]], held_chars - start
