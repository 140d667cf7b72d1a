"""How many tokens of a prompt hold the text that a link of its prefix chain stands for. Pure.

The ingress hashes messages as they came; an engine keeps tokens of what the template made of them. A link may be told
as kept once the tokens that are kept hold all its text. So each message is looked for in the prompt's own text, in
order; where one isn't found as it stands (a template that rewrites it, a normalising tokenizer), nothing from there on
is told: better a link too few than one too many, which would send prompts where their beginning isn't.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from routing.prefix import BLOCK_CHARS, pieces
from wire.messages import Request

Links = tuple[tuple[int, int], ...]


def links_of(request: Request, prompt: Sequence[int], token_bytes: Callable[[int], bytes]) -> Links:
    """(link, tokens that hold its text) for the chain's first links, as far as that can be told.

    `token_bytes`: what a token adds to the text; nothing for a control token.
    """
    chain, body = request.prefix_chain, request.body
    if not chain:
        return ()
    if isinstance(body.prompt, tuple):
        ends = list(accumulate(len(text) for text, _ in pieces((), body.prompt)))
        return tuple((link, bisect_left(ends, (at + 1) * BLOCK_CHARS) + 1) for at, link in enumerate(chain))
    texts = [token_bytes(token) for token in prompt]
    ends = list(accumulate(map(len, texts)))
    borders = _borders(list(pieces(body.messages, body.prompt)), b"".join(texts))
    return tuple((link, bisect_left(ends, end) + 1) for link, end in zip(chain, borders, strict=False))


def _borders(parts: Sequence[tuple[str, bool]], text: bytes) -> Iterator[int]:
    """Where in a prompt's text each block of the parts ends, in bytes, or a little later."""
    border = BLOCK_CHARS
    read_chars = position = 0
    for part, as_it_stands in parts:
        if as_it_stands:
            inner = part.strip()
            position = text.find(_encoded(inner), position)
            if position < 0:
                return
            skipped = read_chars + len(part) - len(part.lstrip())
            # a border before this part lies in what the template makes of roles and the like: it ends where this begins
            while border <= read_chars + len(part):
                yield position + len(_encoded(inner[: max(0, border - skipped)]))
                border += BLOCK_CHARS
            position += len(_encoded(inner))
        read_chars += len(part)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")
