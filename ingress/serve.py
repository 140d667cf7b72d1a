"""POST /v1/chat/completions and /v1/completions: one HTTP call from its headers to its last byte."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from ingress.answer import StreamedAnswer, WholeAnswer
from ingress.body import check_headers, read_body
from ingress.call import Call
from ingress.errors import ApiError, invalid
from ingress.gateway import Gateway
from ingress.limits import Permit
from ingress.outlet import Outlet
from ingress.params import DrawSeed
from ingress.relay import Run
from wire.messages import Credential, Model

Parse = Callable[[bytes, DrawSeed], Call]
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Endpoint:
    """An ASGI app for one route."""

    def __init__(self, gateway: Gateway, parse: Parse, route: str) -> None:
        self._gateway = gateway
        self._parse = parse
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["route"] = self._route
        gateway, headers = self._gateway, Headers(scope=scope)
        credential = gateway.authenticate(headers)
        gateway.check_open()
        check_headers(headers, gateway.settings.max_body_bytes)
        raw = await read_body(receive, gateway.settings.max_body_bytes)
        call = self._parse(raw, draw_seed)
        model = gateway.model(call.model, credential)
        if call.n > model.max_n:
            raise invalid("n", f"'n' must be at most {model.max_n} for the model '{model.name}'.")
        exchange = _Exchange(gateway, call, model, credential, scope["state"]["request_id"], headers)
        with gateway.metrics.open_calls.track_inprogress():
            await (exchange.stream if call.stream else exchange.whole)(receive, send)


def draw_seed() -> int:
    """A seed for a client that gave none."""
    return secrets.randbits(63)


class _Exchange:
    """A parsed and authenticated call, and its answer."""

    def __init__(
        self, gateway: Gateway, call: Call, model: Model, credential: Credential, request_id: str, headers: Headers
    ) -> None:
        self._gateway = gateway
        self._call = call
        self._model = model
        self._credential = credential
        self._request_id = request_id
        self._headers = headers

    async def whole(self, receive: Receive, send: Send) -> None:
        """One JSON body."""
        answer = WholeAnswer(self._call, self._fields())
        async with self._running(answer) as runs, _watching(receive) as gone:
            await asyncio.wait((answer.done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done.done():
                _leave(runs)
                return
            result = answer.done.result()
            if isinstance(result, ApiError):
                raise result
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(result)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": result})

    async def stream(self, receive: Receive, send: Send) -> None:
        """Server-sent events. The status line waits for Accepted, so that errors are HTTP errors, but not for long."""
        settings = self._gateway.settings
        outlet = Outlet(settings.stream_buffer_bytes, settings.keep_alive_ms / 1_000)
        answer = StreamedAnswer(self._call, self._fields(), outlet)
        async with self._running(answer) as runs, _watching(receive) as gone:
            await asyncio.wait(
                (answer.opened, gone), timeout=settings.header_timeout_ms / 1_000, return_when=asyncio.FIRST_COMPLETED
            )
            if gone.done():
                _leave(runs)
                return
            if answer.opened.done() and (error := answer.opened.result()) is not None:
                raise error
            if not answer.opened.done():
                outlet.ping()
            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            await self._relay(outlet, gone, runs, send)

    async def _relay(self, outlet: Outlet, gone: asyncio.Future[None], runs: list[Run], send: Send) -> None:
        pump = asyncio.create_task(_pump(outlet, send), name="pump")
        try:
            await asyncio.wait((pump, gone, outlet.overflowed), return_when=asyncio.FIRST_COMPLETED)
            if outlet.overflowed.done():
                self._gateway.metrics.slow_readers.inc()
            if outlet.overflowed.done() or not pump.done():
                _leave(runs)
        finally:
            pump.cancel()
            await asyncio.wait((pump,))
        if not pump.cancelled():
            pump.result()

    def _fields(self) -> dict[str, object]:
        return self._gateway.fields(self._call, self._request_id)

    @asynccontextmanager
    async def _running(self, answer: WholeAnswer | StreamedAnswer) -> AsyncIterator[list[Run]]:
        """The call's requests, sent; whatever is still open in the end is given up."""
        permit: Permit = self._gateway.admit(self._credential, self._model)
        runs: list[Run] = []
        try:
            runs = self._gateway.launch(
                self._call, self._model, self._credential, self._request_id, self._headers, answer
            )
            yield runs
        finally:
            for run in runs:
                run.give_up()
            permit.release(sum(run.used_tokens for run in runs))


async def _pump(outlet: Outlet, send: Send) -> None:
    while await outlet.more():
        while (event := outlet.next()) is not None:
            await send({"type": "http.response.body", "body": event, "more_body": True})
    # A stream whose reader was too slow is cut without its last chunk, so that nobody takes it for whole.
    if not outlet.overflowed.done():
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _leave(runs: Iterable[Run]) -> None:
    for run in runs:
        run.client_gone()


@asynccontextmanager
async def _watching(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """A task that is done once the client has left."""
    task = asyncio.create_task(_disconnected(receive), name="disconnect")
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
