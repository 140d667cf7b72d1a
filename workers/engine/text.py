"""Token ids → text, piece by piece: never half a character, never a part of a stop string. Pure.

However the ids are cut into pushes, the pieces join to the same text: the bytes of all ids, decoded as UTF-8, cut
before the stop string that is complete first (of two complete at the same character, before the longer).

Where the text may hold tool calls (`wire.calls`), stop strings end what comes before the first call, not calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

from wire.calls import OPENING

TokenBytes = Callable[[int], bytes]


class _Stop:
    """One stop string's progress: `matched` is the longest prefix of it that the text so far ends with.

    Knuth, Morris, Pratt 1977: constant work a character, however the string repeats itself.
    """

    __slots__ = ("_border", "_string", "matched")

    def __init__(self, string: str) -> None:
        self._string = string
        self._border = _borders(string)
        self.matched = 0

    def feed(self, character: str) -> bool:
        """Take a character; whether the stop string is now complete."""
        string, matched = self._string, self.matched
        while matched and string[matched] != character:
            matched = self._border[matched - 1]
        if string[matched] == character:
            matched += 1
        self.matched = matched
        return matched == len(string)


def _borders(string: str) -> list[int]:
    borders, matched = [0], 0
    for character in string[1:]:
        while matched and string[matched] != character:
            matched = borders[matched - 1]
        if string[matched] == character:
            matched += 1
        borders.append(matched)
    return borders


class TextStream:
    """The text of one choice as it grows."""

    __slots__ = (
        "_decoder",
        "_finished",
        "_firsts",
        "_held",
        "_opening",
        "_stops",
        "_token_bytes",
        "_unstopped",
        "calling",
        "stopped",
    )

    def __init__(
        self, token_bytes: TokenBytes, stops: Sequence[str] = (), *, calls: bool = False, unstopped: int = 0
    ) -> None:
        """`calls`: the text may hold tool calls. `unstopped`: so many ids at first end by no stop string."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(_Stop(stop) for stop in stops if stop)
        self._firsts = frozenset(stop[0] for stop in stops if stop)
        self._opening = _Stop(OPENING) if calls else None
        self._held = ""
        self._unstopped = unstopped
        """ids to come in whose text no stop string counts"""
        self._finished = False
        self.calling = False
        """a tool call has begun: there is nothing but calls from here on"""
        self.stopped = False
        """a stop string is complete: there is no more text, whatever ids follow"""

    def push(self, ids: Iterable[int]) -> str:
        """Take ids; the text that is certain now and was not before."""
        if self.stopped or self._finished:
            return ""
        if not self._unstopped:
            return self._release(self._decoded(ids))
        ids = tuple(ids)
        text = self._release(self._decoded(ids[: self._unstopped]))
        rest = ids[self._unstopped :]
        self._unstopped = max(0, self._unstopped - len(ids))
        return text + self._release(self._decoded(rest)) if rest else text

    def _decoded(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        """No more ids come: what was held back. Bytes that never became a character show as U+FFFD."""
        if self.stopped or self._finished:
            return ""
        text = self._release(self._decoder.decode(b"", final=True))
        self._finished = True
        if self._opening is not None and not self.calling:  # what might have become a call is text after all
            text += self._cut(OPENING[: self._opening.matched])
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, new: str) -> str:
        if self._opening is None:
            return self._cut(new)
        if self.calling or not new:
            return new
        matched, opening = self._opening.matched, self._opening
        text = OPENING[:matched] + new
        end = next((at for at in range(matched, len(text)) if opening.feed(text[at])), None)
        if end is None:
            return self._cut(text[: len(text) - opening.matched])
        before = self._cut(text[: end + 1 - len(OPENING)])
        if self.stopped:
            return before
        self.calling = True
        held, self._held = self._held, ""
        return before + held + text[end + 1 - len(OPENING) :]

    def _cut(self, new: str) -> str:
        """What of some text before the first call is certain, up to a stop string."""
        if self._unstopped:
            return new
        if not self._held and self._firsts.isdisjoint(new):  # nothing begins here: the usual case
            return new
        text = self._held + new
        for end in range(len(self._held), len(text)):
            complete = [stop.matched for stop in self._stops if stop.feed(text[end])]
            if complete:
                self._held, self.stopped = "", True
                return text[: end + 1 - max(complete)]
        certain = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]
