"""Deltas → server-sent events. What doesn't change from event to event is built once; a token costs one small join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from ingress.errors import ApiError
from ingress.logprobs import chat_logprobs, legacy_logprobs
from wire.messages import ChoiceEnd, Delta, TokenLogprob

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_dumps = orjson.dumps


class Chunks(Protocol):
    """One streamed call's events."""

    def delta(self, choice: int, delta: Delta) -> list[bytes]:
        """Events of new tokens; none while text is held back."""
        ...

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The one event without choices."""
        ...


def error_event(error: ApiError) -> bytes:
    """What OpenAI's SDKs raise as an APIError mid-stream. No [DONE] follows: the answer isn't complete."""
    return b"data: " + error.body() + b"\n\n"


class Frame:
    """The constant parts around a choice."""

    __slots__ = ("_head", "_tail")

    def __init__(self, fields: dict[str, Any], include_usage: bool) -> None:
        self._head = b"data: " + _dumps(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    @classmethod
    def of_chat(cls, fields: dict[str, Any], include_usage: bool) -> Frame:
        """Around the choices of chat chunks."""
        return cls({**fields, "object": "chat.completion.chunk"}, include_usage)

    def choice(self, index: int, before: bytes) -> bytes:
        """Everything up to a choice's text."""
        return self._head + b'{"index":%d,' % index + before

    def finish(self, after: bytes, reason: ChoiceEnd | None) -> bytes:
        """Everything after a choice's text."""
        return after + b',"finish_reason":' + _dumps(reason) + b"}" + self._tail

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._head + b'],"usage":' + _dumps(usage) + b"}\n\n"


class ChatChunks:
    """`chat.completion.chunk` events."""

    def __init__(self, fields: dict[str, Any], choices: int, include_usage: bool) -> None:
        frame = Frame.of_chat(fields, include_usage)
        self._frame = frame
        self._first = [frame.choice(i, b'"delta":{"role":"assistant","content":') for i in range(choices)]
        self._next = [frame.choice(i, b'"delta":{"content":') for i in range(choices)]
        self._last = [frame.choice(i, b'"delta":{') for i in range(choices)]
        self._started = [False] * choices
        self._plain_after = frame.finish(b'},"logprobs":null', None)

    def delta(self, choice: int, delta: Delta) -> list[bytes]:
        events = []
        if delta.text or delta.logprobs or (delta.end and not self._started[choice]):
            before = self._next[choice] if self._started[choice] else self._first[choice]
            self._started[choice] = True
            events.append(before + _dumps(delta.text) + self._after(delta))
        if delta.end is not None:
            events.append(self._last[choice] + self._frame.finish(b'},"logprobs":null', delta.end))
        return events

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._frame.usage(usage)

    def _after(self, delta: Delta) -> bytes:
        if not delta.logprobs:
            return self._plain_after
        return self._frame.finish(b'},"logprobs":' + _dumps(chat_logprobs(delta.logprobs)), None)


class TextChunks:
    """`text_completion` events. `echo`: by choice, the text shown before the completion's."""

    def __init__(
        self, fields: dict[str, Any], choices: int, include_usage: bool, echo: Sequence[str], n: int = 1
    ) -> None:
        frame = Frame({**fields, "object": "text_completion"}, include_usage)
        self._frame = frame
        self._before = [frame.choice(i, b'"text":') for i in range(choices)]
        self._offset = [0] * choices
        self._echo = dict(enumerate(echo))
        self._n = n
        self._prompts: dict[int, tuple[TokenLogprob, ...]] = {}
        """by choice that hasn't shown them yet; a request's first choice brings them for all"""
        self._plain_after = frame.finish(b',"logprobs":null', None)

    def delta(self, choice: int, delta: Delta) -> list[bytes]:
        if delta.prompt is not None:
            self._prompts |= dict.fromkeys(range(choice, choice + self._n), delta.prompt)
        text, prompt = self._echo.pop(choice, "") + delta.text, self._prompts.pop(choice, ())
        events = []
        if text or delta.logprobs:
            events.append(self._before[choice] + _dumps(text) + self._after(choice, delta.logprobs or (), prompt))
        if delta.end is not None:
            events.append(self._before[choice] + b'""' + self._frame.finish(b',"logprobs":null', delta.end))
        return events

    def usage(self, usage: dict[str, Any]) -> bytes:
        return self._frame.usage(usage)

    def _after(self, choice: int, logprobs: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob]) -> bytes:
        if not logprobs and not prompt:
            return self._plain_after
        legacy = legacy_logprobs(logprobs, self._offset[choice], prompt)
        self._offset[choice] += sum(len(one.token) for one in (*prompt, *logprobs))
        return self._frame.finish(b',"logprobs":' + _dumps(legacy), None)
