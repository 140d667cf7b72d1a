"""Token ids → text, piece by piece: never half a character, never a part of a stop string. Pure.

However the ids are cut into pushes, the pieces join to the same text: the bytes of all ids, decoded as UTF-8, cut
before the stop string that is complete first (of two complete at the same character, before the longer).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence

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

    __slots__ = ("_decoder", "_finished", "_held", "_stops", "_token_bytes", "stopped")

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(_Stop(stop) for stop in stops if stop)
        self._held = ""
        self._finished = False
        self.stopped = False
        """a stop string is complete: there is no more text, whatever ids follow"""

    def push(self, ids: Iterable[int]) -> str:
        """Take ids; the text that is certain now and was not before."""
        if self.stopped or self._finished:
            return ""
        return self._release(self._decoder.decode(b"".join(map(self._token_bytes, ids))))

    def finish(self) -> str:
        """No more ids come: what was held back. Bytes that never became a character show as U+FFFD."""
        if self.stopped or self._finished:
            return ""
        text = self._release(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        self._finished = True
        return text

    def _release(self, new: str) -> str:
        if not self._stops or not new:
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
