"""The text of an answer that may hold tool calls → text and calls, piece by piece. Pure.

However the text is cut, the pieces join to the same: what a stream shows and what a whole answer holds are one thing.
Arguments are passed on as the model wrote them, character by character; held back is only what may be the beginning of
a call, and a call until its name is known. `wire.calls` has the form, which the engine binds the model to.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from wire.calls import CLOSING, OPENING
from wire.messages import ChoiceEnd

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*\}\s*" + CLOSING)
_BLANK = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A call begins; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments, which are a JSON object."""

    index: int
    text: str


Piece = Text | Begun | Arguments


class CallReader:
    """One choice's text in, pieces out."""

    __slots__ = ("_calls", "_depth", "_escaped", "_held", "_must", "_quoted", "_step")

    def __init__(self, *, must: bool) -> None:
        """`must`: the answer is nothing but calls."""
        self._must = must
        self._step = self._text
        self._held = ""
        self._calls = 0
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str) -> list[Piece]:
        """Take more text; the pieces that are certain now and were not before."""
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            before = self._step, self._held
            pieces += self._step()
            if (self._step, self._held) == before:  # it takes more text to go on
                break
        return pieces

    def finish(self, end: ChoiceEnd | None) -> list[Piece]:
        """No more text comes: what was held back, unless it is of a call that was cut."""
        held, self._held = self._held, ""
        if self._step == self._text:
            return [] if self._must or not held else [Text(held)]
        if self._step == self._head and end != "length":  # no call after all
            return [Text(OPENING + held)]
        return []

    def _text(self) -> Iterator[Piece]:
        before, opening, rest = self._held.partition(OPENING)
        if opening:
            self._step, self._held = self._head, rest
        else:
            kept = _begun(self._held)
            before, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        if before:
            yield Text(before)

    def _head(self) -> Iterator[Piece]:
        if found := _HEAD.match(self._held):
            self._step, self._held = self._arguments, self._held[found.end() :]
            yield Begun(self._calls, found[1])

    def _arguments(self) -> Iterator[Piece]:
        end = next((at for at, character in enumerate(self._held, 1) if self._closes(character)), None)
        written = self._held[:end]
        self._held = self._held[len(written) :]
        yield Arguments(self._calls, written)
        if end is not None:
            self._calls += 1
            self._step = self._tail

    def _closes(self, character: str) -> bool:
        """Whether the arguments are complete with this character."""
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        else:
            self._depth += (character in "{[") - (character in "}]")
        return self._depth == 0

    def _tail(self) -> Iterator[Piece]:
        if found := _TAIL.match(self._held):
            self._step, self._held = self._between, self._held[found.end() :]
        yield from ()

    def _between(self) -> Iterator[Piece]:
        """Blanks, and then another call."""
        rest = self._held[_BLANK.match(self._held).end() :]  # type: ignore[union-attr]
        if rest:
            self._step, self._held = self._text, rest
        yield from ()


def call_id(answer_id: str, choice: int, index: int) -> str:
    """A call's id: the same however often the answer is read."""
    name = f"{answer_id}/{choice}/{index}".encode()
    return "call_" + hashlib.blake2b(name, digest_size=12).hexdigest()


def _begun(text: str) -> int:
    """How many characters at the end may be the beginning of a call."""
    longest = min(len(text), len(OPENING) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(OPENING[:size])), 0)
