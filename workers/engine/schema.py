"""JSON Schemas as clients send them → as the grammar compiler takes them. Pure.

What comes out allows nothing that the client's own schema forbids, except where a schema that isn't strict asks for
what can't be compiled: that is left out, as OpenAI's best effort does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from workers.engine.errors import GrammarRefused

MAX_BYTES = 64 * 1024
"""of a schema as JSON: compiling larger ones would hold up an engine for too long"""
LAYOUT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""on one line, as models learn calls and Python writes JSON; where blanks are free, small models write them for ever"""
_OPTIONS = "x-guidance"
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "$ref", "$dynamicRef")
"""keywords that say more of the same value"""
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "minProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")
_LARGEST = 10**18
_BESIDE_REF = ("title", "description", "default", "examples", "$comment", "$defs", "definitions", "$schema", "$id")


def compilable(schema: Mapping[str, Any], param: str, *, strict: bool) -> str:
    """The schema as JSON, with the compiler's options; GrammarRefused (`param`) for one too large or not strict enough.

    Objects that list their properties and say nothing of others have no others: OpenAI's strict schemas must say so,
    and a small model would go on inventing them. Integers without bounds end at 10¹⁸: it would write digits for ever.
    """
    if strict and any(node.get("additionalProperties", False) is not False for node in _nodes(schema)):
        raise GrammarRefused("with 'strict', 'additionalProperties' must be false in every object", param)
    plain = {name: value for name, value in schema.items() if name != _OPTIONS}
    if not _satisfiable(plain):
        raise GrammarRefused("no value can satisfy it: it requires itself within itself, without end", param)
    if not any(map(_adds_up, _nodes(plain))):
        plain = _narrowed(plain)
    text = json.dumps({**plain, _OPTIONS: {**LAYOUT, "lenient": not strict}}, ensure_ascii=False)
    if len(text) > MAX_BYTES:
        raise GrammarRefused(f"it is longer than {MAX_BYTES} characters", param)
    return text


def _satisfiable(schema: Mapping[str, Any]) -> bool:
    """Whether a finite value may exist: schemas are closed once all that they can't do without is."""
    open_ = {id(node): node for node in _nodes(schema)}
    while id(schema) in open_:
        closed = [name for name, node in open_.items() if _finite(node, schema, open_)]
        if not closed:
            return False
        for name in closed:
            del open_[name]
    return True


def _finite(node: Mapping[str, Any], root: Mapping[str, Any], open_: Container[int]) -> bool:
    """Whether nothing that a schema can't do without is still open."""

    def fine(part: Any) -> bool:
        return part is not False and id(part) not in open_

    if isinstance(node.get("allOf"), list) and not all(map(fine, node["allOf"])):
        return False
    for name in ("anyOf", "oneOf"):
        if isinstance(node.get(name), list) and node[name] and not any(map(fine, node[name])):
            return False
    if "$ref" in node and not fine(_target(node["$ref"], root)):
        return False
    kinds = node.get("type") if isinstance(node.get("type"), list) else [node.get("type")]
    if kinds == ["object"] and isinstance(node.get("properties"), dict) and isinstance(node.get("required"), list):
        return all(fine(node["properties"].get(name, True)) for name in node["required"] if isinstance(name, str))
    least = node.get("minItems", 0)
    if kinds == ["array"] and isinstance(least, int) and least > 0 and not node.get("prefixItems"):
        return fine(node.get("items", True))
    return True


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema points at; True, which allows anything, for any other."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return True
    found: Any = root
    for part in reference[2:].split("/") if len(reference) > 2 else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return True
    return found


def _adds_up(node: Mapping[str, Any]) -> bool:
    """Whether several descriptions of one object hold together: closing one would forbid what the others allow."""
    if "$ref" in node and set(node) - {"$ref", *_BESIDE_REF}:
        return True
    return "allOf" in node or ("properties" in node and any(name in node for name in _IN_PLACE))


def _narrowed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    narrowed = _over_parts(schema, _narrowed)
    if _lists_all(narrowed):
        narrowed["additionalProperties"] = False
    if _is_free_integer(narrowed):
        narrowed |= {"minimum": -_LARGEST, "maximum": _LARGEST}
    return narrowed


def _is_free_integer(node: Mapping[str, Any]) -> bool:
    kind = node.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds and not any(name in node for name in (*_BOUNDS, *_IN_PLACE))


def _lists_all(node: Mapping[str, Any]) -> bool:
    listed, required = node.get("properties"), node.get("required", [])
    if not isinstance(listed, dict) or any(name in node for name in (*_OPEN, *_IN_PLACE)):
        return False
    return isinstance(required, list) and all(name in listed for name in required)


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and every schema in it."""
    found: list[Any] = [schema]
    while found:
        node = found.pop()
        if isinstance(node, dict):
            yield node
            _over_parts(node, found.append)


def _over_parts(node: Mapping[str, Any], do: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with `do` done to the schemas right in it."""
    return {name: _over_part(name, value, do) for name, value in node.items()}


def _over_part(name: str, value: Any, do: Callable[[Any], Any]) -> Any:
    if name in _MAPS and isinstance(value, dict):
        return {key: do(inner) for key, inner in value.items()}
    if name in _LISTS and isinstance(value, list):
        return [do(inner) for inner in value]
    return do(value) if name in _SINGLE else value
