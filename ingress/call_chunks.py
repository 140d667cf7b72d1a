"""Deltas → the events and messages of answers that may hold tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from ingress.calls import Arguments, Begun, CallReader, Piece, Text, call_id
from ingress.chunks import Frame
from ingress.logprobs import chat_logprobs
from wire.calls import must_call
from wire.messages import Body, ChoiceEnd, Delta

_dumps = orjson.dumps


class CallChunks:
    """`chat.completion.chunk` events: a call's first has its id and name, those that follow pieces of its arguments."""

    def __init__(self, fields: dict[str, Any], choices: int, include_usage: bool, body: Body) -> None:
        self._id = str(fields["id"])
        self._frame = Frame.of_chat(fields, include_usage)
        self._readers = [CallReader(must=must_call(body)) for _ in range(choices)]
        self._first: dict[str, Any] = {"role": "assistant", "content": None if must_call(body) else ""}
        self._started = [False] * choices

    def delta(self, choice: int, delta: Delta) -> list[bytes]:
        reader = self._readers[choice]
        pieces = reader.feed(delta.text)
        if delta.end is not None:
            pieces += reader.finish(delta.end)
        changes = [self._change(choice, piece) for piece in pieces]
        if not changes and (delta.logprobs or (delta.end and not self._started[choice])):
            changes.append({})
        events = []
        for index, change in enumerate(changes):
            logprobs = chat_logprobs(delta.logprobs) if delta.logprobs and not index else None
            events.append(self._event(choice, change, logprobs, None))
        if delta.end is not None:
            events.append(self._event(choice, {}, None, delta.end))
        return events

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._frame.usage(usage)

    def _change(self, choice: int, piece: Piece) -> dict[str, Any]:
        match piece:
            case Text():
                return {"content": piece.text}
            case Begun():
                return {"tool_calls": [{"index": piece.index} | _call(self._id, choice, piece)]}
            case Arguments():
                return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

    def _event(self, choice: int, change: dict[str, Any], logprobs: Any, end: ChoiceEnd | None) -> bytes:
        if not self._started[choice]:
            self._started[choice] = True
            first = self._first | ({"content": None} if "tool_calls" in change else {})
            change = first | change
        shown = b',"logprobs":' + _dumps(logprobs)
        return self._frame.choice(choice, b'"delta":' + _dumps(change)) + self._frame.finish(shown, end)


def message_of(body: Body, answer_id: str, choice: int, text: str, end: ChoiceEnd | None) -> dict[str, Any]:
    """What a whole answer's message holds besides its role: `content`, and `tool_calls` if there are any."""
    reader = CallReader(must=must_call(body))
    pieces = [*reader.feed(text), *reader.finish(end)]
    content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls = [
        _call(answer_id, choice, begun, _joined(pieces, begun.index)) for begun in pieces if isinstance(begun, Begun)
    ]
    shown = content or (None if calls or must_call(body) else "")
    return {"content": shown, "refusal": None} | ({"tool_calls": calls} if calls else {})


def _joined(pieces: Iterable[Piece], index: int) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == index)


def _call(answer_id: str, choice: int, begun: Begun, arguments: str = "") -> dict[str, Any]:
    return {
        "id": call_id(answer_id, choice, begun.index),
        "type": "function",
        "function": {"name": begun.name, "arguments": arguments},
    }
