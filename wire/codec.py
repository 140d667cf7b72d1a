"""Bytes ↔ messages: JSON by orjson with a version field; types are checked once, here."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

import msgspec
import orjson

from wire import messages
from wire.errors import DecodeError

VERSION = 1
_TYPES: dict[str, type[messages.Message]] = {
    name: kind
    for name, kind in vars(messages).items()
    if isinstance(kind, type) and issubclass(kind, messages.Message) and kind is not messages.Message
}
M = TypeVar("M", bound=messages.Message)


def encode(message: messages.Message) -> bytes:
    """The record value of a message."""
    plain = msgspec.to_builtins(message)
    plain["v"] = VERSION
    return orjson.dumps(plain)


def decode(value: bytes | None, kind: Any = messages.Message) -> Any:
    """The message in a record value. `kind`: a message class or a union of them that the reader expects.

    DecodeError for what isn't JSON, has another version, another kind or a wrong type; it never quotes the content.
    """
    if value is None:
        raise DecodeError("the record has no value")
    try:
        plain = orjson.loads(value)
    except orjson.JSONDecodeError as exc:
        raise DecodeError("the value isn't JSON") from exc
    if not isinstance(plain, dict):
        raise DecodeError("the value isn't a JSON object")
    if plain.get("v") != VERSION:
        raise DecodeError(f"the format's version isn't {VERSION}")
    tag = plain.get("t")
    found = _TYPES.get(tag) if isinstance(tag, str) else None
    if found is None:
        raise DecodeError("no message type of this name")
    if kind is not messages.Message and found not in (get_args(kind) or (kind,)):
        raise DecodeError(f"a {found.__name__} has no place here")
    try:
        return msgspec.convert(plain, found)
    except (msgspec.ValidationError, ValueError) as exc:
        raise DecodeError(f"a field of this {found.__name__} has the wrong type or is missing") from exc
