"""The outermost layer: a request id on every answer, CORS, and an envelope for whatever goes wrong inside."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingress.errors import ApiError
from ingress.metrics import Metrics

log = logging.getLogger(__name__)
_EXPOSED = b"x-request-id, retry-after, x-should-retry"
_METHODS = b"GET, POST, DELETE, OPTIONS"
_PREFLIGHT_S = b"600"


class Edge:
    """ASGI middleware around everything.

    `new_id` makes a request id; a call's own request gets the same one. `draining`: connections are to end.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, new_id: Callable[[], str], draining: Callable[[], bool]) -> None:
        self._app = app
        self._metrics = metrics
        self._new_id = new_id
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        state: dict[str, Any] = {"request_id": self._new_id(), "route": "other"}
        scope["state"] = state
        scope["app"] = self._app  # with it, Starlette's router raises what it doesn't find
        answer = _Answer(send, self._common(state["request_id"], headers, scope), state, self._metrics)
        try:
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                state["route"] = "preflight"
                await _respond(answer.send, 204, _preflight(headers), b"")
            else:
                await self._app(scope, receive, answer.send)
        except ApiError as error:
            await self._error(answer, error)
        except HTTPException as error:
            await self._error(answer, _of_router(error, scope["method"]), _allow(error))
        except Exception:
            log.exception("request %s failed inside the ingress", state["request_id"])
            await self._error(answer, ApiError(500, "Something failed inside the service.", code="internal_error"))

    async def _error(self, answer: _Answer, error: ApiError, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
        # Once the status line is out the stream is cut short instead, which clients see as an error too.
        if not answer.started:
            await _respond(answer.send, error.status, [*error.headers(), *more], error.body())

    def _common(self, request_id: str, headers: Headers, scope: Scope) -> list[tuple[bytes, bytes]]:
        out = [(b"x-request-id", f"req_{request_id}".encode())]
        if "origin" in headers:
            out += [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", _EXPOSED)]
        if self._draining() and scope["http_version"].startswith("1"):
            out.append((b"connection", b"close"))
        return out


class _Answer:
    """Adds the common headers to the status line, and counts it."""

    def __init__(self, send: Send, common: list[tuple[bytes, bytes]], state: dict[str, Any], metrics: Metrics) -> None:
        self._send = send
        self._common = common
        self._state = state
        self._metrics = metrics
        self.started = False

    def send(self, message: Message) -> Awaitable[None]:
        # No coroutine of its own: a token event passes here, and costs what the server's own send costs.
        if message["type"] == "http.response.start":
            self.started = True
            message = {**message, "headers": [*message.get("headers", ()), *self._common]}
            self._metrics.answers.labels(self._state["route"], str(message["status"])).inc()
        return self._send(message)


async def _respond(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _of_router(error: HTTPException, method: str) -> ApiError:
    if error.status_code == 405:
        return ApiError(405, f"{method} isn't allowed on this path.", code="method_not_allowed")
    return ApiError(error.status_code, "There is no such path; docs/api.md lists what there is.", code="unknown_url")


def _allow(error: HTTPException) -> list[tuple[bytes, bytes]]:
    """What the path does take, which a 405 must name (RFC 9110, 15.5.6)."""
    methods = (error.headers or {}).get("Allow", "")
    return [(b"allow", ", ".join(sorted(methods.split(", "))).encode())] if methods else []


def _preflight(headers: Headers) -> list[tuple[bytes, bytes]]:
    wanted = headers.get("access-control-request-headers", "authorization, content-type")
    return [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-allow-headers", wanted.encode("latin-1")),
        (b"access-control-max-age", _PREFLIGHT_S),
        (b"vary", b"origin, access-control-request-headers"),
    ]
