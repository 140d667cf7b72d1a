"""The ingress's errors: what a client is told, in OpenAI's envelope."""

from __future__ import annotations

import orjson

from wire.errors import MillstreamError


class IngressError(MillstreamError):
    """Root of the errors of the ingress."""


class ApiError(IngressError):
    """An answer to the client: an HTTP status and OpenAI's `{error: {message, type, param, code}}`.

    `message` says what to do and holds no content of the request beyond names of parameters and models.
    `retry_after_s` sets Retry-After; `should_retry` False tells OpenAI's SDKs that another try is pointless.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        retry_after_s: int | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or _kind(status)
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry

    def body(self) -> bytes:
        """The envelope as JSON."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Content-Type, and Retry-After and x-should-retry where they are set."""
        out = [(b"content-type", b"application/json")]
        if self.retry_after_s is not None:
            out.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.should_retry is not None:
            out.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return out


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """400: a parameter has a value that it can't have."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """400: a parameter that OpenAI knows and this service refuses rather than ignores."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def missing(param: str) -> ApiError:
    """400: a required parameter isn't there."""
    return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def bad_key(message: str) -> ApiError:
    """401: no key, or one that isn't good."""
    return ApiError(401, message, code="invalid_api_key", should_retry=False)


def model_not_found(model: str) -> ApiError:
    """404: no model of this name, or not for this key."""
    shown = model if len(model) <= 200 else model[:200] + "…"
    return ApiError(
        404,
        f"The model '{shown}' does not exist or you do not have access to it; GET /v1/models lists what does.",
        param="model",
        code="model_not_found",
    )


def unavailable(message: str, *, retry_after_s: int = 1, code: str = "service_unavailable") -> ApiError:
    """503: not now, later yes."""
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)
