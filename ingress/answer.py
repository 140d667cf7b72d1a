"""What becomes of a call's requests: events for a stream, or one JSON answer."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from ingress.call import Call
from ingress.call_chunks import CallChunks
from ingress.chunks import DONE, ChatChunks, Chunks, TextChunks, error_event
from ingress.errors import ApiError
from ingress.outlet import Outlet
from ingress.usage import usage_of
from ingress.whole import Whole
from wire.calls import may_call
from wire.messages import Accepted, Delta, End


class Answer(Protocol):
    """Takes what the requests of one call say; `index` is the request's place in the call."""

    def accepted(self, index: int, accepted: Accepted) -> None: ...

    def delta(self, index: int, delta: Delta) -> None: ...

    def ended(self, index: int, end: End) -> None: ...

    def failed(self, error: ApiError) -> None:
        """One request failed, and with it the call."""
        ...


class _Gathered:
    """What both answers keep: who was accepted, and how each request ended."""

    def __init__(self, call: Call, fields: dict[str, Any]) -> None:
        self.call = call
        self.fields = fields
        self.n = call.n
        self.waiting = set(range(len(call.bodies)))
        self.ends: dict[int, End] = {}

    def accept(self, index: int, accepted: Accepted) -> None:
        self.fields.setdefault("system_fingerprint", accepted.fingerprint)
        self.waiting.discard(index)

    def end(self, index: int, end: End) -> bool:
        """Whether this was the last."""
        self.ends[index] = end
        return len(self.ends) == len(self.call.bodies)


class StreamedAnswer:
    """Server-sent events into an outlet."""

    def __init__(self, call: Call, fields: dict[str, Any], outlet: Outlet) -> None:
        self._so_far = _Gathered(call, fields)
        self._outlet = outlet
        self._chunks: Chunks | None = None
        self._n = call.n
        self.opened: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        """done when all requests are accepted, or with the error that the HTTP status is to tell"""

    def accepted(self, index: int, accepted: Accepted) -> None:
        so_far = self._so_far
        so_far.accept(index, accepted)
        if self._chunks is None:
            self._chunks = _chunks(so_far.call, so_far.fields)
        if not so_far.waiting and not self.opened.done():
            self.opened.set_result(None)

    def delta(self, index: int, delta: Delta) -> None:
        assert self._chunks is not None, "a Stream delivers nothing before Accepted"
        self._outlet.put(self._chunks.delta(index * self._n + delta.choice, delta))

    def ended(self, index: int, end: End) -> None:
        if not self._so_far.end(index, end) or self._chunks is None:
            return
        if self._so_far.call.include_usage:
            self._outlet.put([self._chunks.usage(usage_of(self._so_far.ends.values()))])
        self._outlet.put([DONE])
        self._outlet.close()

    def failed(self, error: ApiError) -> None:
        if not self.opened.done():
            self.opened.set_result(error)
        self._outlet.put([error_event(error)])
        self._outlet.close()


class WholeAnswer:
    """One JSON body."""

    def __init__(self, call: Call, fields: dict[str, Any]) -> None:
        self._so_far = _Gathered(call, fields)
        self._whole = Whole(call)
        self.done: asyncio.Future[bytes | ApiError] = asyncio.get_running_loop().create_future()

    def accepted(self, index: int, accepted: Accepted) -> None:
        self._so_far.accept(index, accepted)

    def delta(self, index: int, delta: Delta) -> None:
        self._whole.delta(index * self._so_far.n + delta.choice, delta)

    def ended(self, index: int, end: End) -> None:
        if self._so_far.end(index, end) and not self.done.done():
            self.done.set_result(self._whole.body(self._so_far.fields, self._so_far.ends.values()))

    def failed(self, error: ApiError) -> None:
        if not self.done.done():
            self.done.set_result(error)


def _chunks(call: Call, fields: dict[str, Any]) -> Chunks:
    body = call.bodies[0]
    if call.endpoint == "chat":
        fields = {**fields, "service_tier": call.tier}
    if may_call(body):
        return CallChunks(fields, call.choices, call.include_usage, body)
    if call.endpoint == "chat":
        return ChatChunks(fields, call.choices, call.include_usage)
    echo = [text for text in call.echo for _ in range(call.n)]
    return TextChunks(fields, call.choices, call.include_usage, echo, call.n)
