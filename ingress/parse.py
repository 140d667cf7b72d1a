"""Bytes → typed bodies. Strict where a lenient parser would guess: doubled keys, surrogates, NaN, depth are 400."""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec
import orjson

from ingress.errors import ApiError, invalid, missing

T = TypeVar("T")
MAX_DEPTH = 64
"""nesting of a body; JSON schemas in the field stay far below"""
_PATH = re.compile(r"\A(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?\Z", re.DOTALL)
_MISSING = re.compile(r"\AObject missing required field `(?P<name>.*)`\Z")
_WORDS = {"`int`": "an integer", "`float`": "a number", "`str`": "a string", "`bool`": "true or false"}


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body; ApiError 400 for anything else.

    orjson judges syntax, UTF-8, surrogates and number range; the standard parser then sees every pair of every
    object, which is the only way to find a key that is there twice.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise ApiError(
            400, f"We could not parse the JSON body of your request: {_syntax(exc)}.", code="invalid_json"
        ) from exc
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.", code="invalid_json")
    _check_depth(value)
    try:
        return json.loads(raw, object_pairs_hook=_unique)  # type: ignore[no-any-return]
    except ValueError as exc:  # an integer of more digits than Python converts
        raise ApiError(400, "A number in the body has too many digits.", code="invalid_json") from exc


def convert(plain: dict[str, Any], kind: type[T]) -> T:
    """`plain` as a `kind`; ApiError 400 naming the parameter that doesn't fit."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as exc:
        raise _translated(str(exc)) from exc


def convert_at(path: str, plain: Any, kind: type[T]) -> T:
    """As `convert`, for what stands at `path` of a body."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as exc:
        raise _translated(str(exc), path) from exc


def _syntax(exc: orjson.JSONDecodeError) -> str:
    # The message holds no content of the body, only what was expected and where.
    return str(exc).split(": line", maxsplit=1)[0] + f" (line {exc.lineno}, column {exc.colno})"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        shown = twice if len(twice) <= 64 else twice[:64] + "…"
        raise ApiError(400, f"The key '{shown}' occurs twice in one JSON object.", param=shown, code="invalid_json")
    return out


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ApiError(400, f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")


def _translated(text: str, above: str | None = None) -> ApiError:
    found = _PATH.match(text)
    what, path = (found["what"], found["path"]) if found else (text, None)
    path = ".".join(filter(None, (above, path))) or None
    if absent := _MISSING.match(what):
        return missing(f"{path}.{absent['name']}" if path else absent["name"])
    what = what.replace(" | null", "").replace("Expected", "expected")
    for word, plain in _WORDS.items():
        what = what.replace(word, plain)
    what = what.replace("`", "")
    if path is None:
        return invalid(None, f"Invalid body: {what}.")
    code = "invalid_type" if ", got " in what else "invalid_value"
    return invalid(path, f"Invalid value for '{path}': {what}.", code)
