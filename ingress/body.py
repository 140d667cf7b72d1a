"""A request's body: read up to a bound, and its type checked first."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive

from ingress.errors import ApiError

JSON_TYPES = ("application/json", "text/json")


def check_headers(headers: Mapping[str, str], max_bytes: int) -> None:
    """ApiError 415 or 413 for a body that needn't be read to be refused."""
    kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind not in JSON_TYPES and not kind.endswith("+json"):
        raise ApiError(
            415, "Send the body as JSON, with 'Content-Type: application/json'.", code="invalid_content_type"
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Send the body without a Content-Encoding.", code="invalid_content_encoding")
    length = headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise too_large(max_bytes)


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """The whole body. ApiError 413 as soon as it is too long, 400 if it breaks off."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The body broke off or its chunks are malformed.", code="incomplete_body")
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def too_large(max_bytes: int) -> ApiError:
    """413: the body is over the limit."""
    return ApiError(413, f"The body is over the limit of {max_bytes} bytes.", code="request_too_large")
