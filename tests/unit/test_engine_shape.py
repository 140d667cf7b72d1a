"""What a request says of its answer's form → the grammar: what it lets through, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wire.messages import Body, Sampling
from workers.engine.errors import GrammarRefused, Uncompilable
from workers.engine.schema import MAX_BYTES, compilable
from workers.engine.shape import MOST_CALLS, shape_of
from workers.engine.simulated_vocabulary import SimulatedVocabulary

VOCABULARY = SimulatedVocabulary()
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PAIR = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 🌾"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2.5}}\n</tool_call>'
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


TOOLS = (tool("weather", CITY), tool("add", PAIR), tool("ping"))


def body(**fields: Any) -> Body:
    return Body(sampling=Sampling(seed=0), **fields)


def takes(body: Body, text: str) -> bool | None:
    """Whether an answer may be `text`; None if it may only begin so."""
    shape = shape_of(body)
    assert shape is not None
    matcher = VOCABULARY.grammars.start(shape[0])
    for token in VOCABULARY.encode_text(text):
        allowed = matcher.allowed()
        if allowed is not None and not allowed[token // 8] >> token % 8 & 1:
            return False
        matcher.take(token)
    if matcher.ended:
        return True
    allowed, (end,) = matcher.allowed(), VOCABULARY.eos_ids
    return True if allowed is None or allowed[end // 8] >> end % 8 & 1 else None


def test_plain_text_is_bound_to_nothing() -> None:
    for plain in (body(), body(tools=TOOLS, tool_choice="none"), body(tool_choice="required")):
        assert shape_of(plain) is None


@pytest.mark.parametrize(
    ("fields", "text", "taken"),
    [
        ({"tool_choice": "required"}, WEATHER, True),
        ({"tool_choice": "required"}, f"{WEATHER}\n{ADD}\n{PING}", True),
        ({"tool_choice": "required"}, WEATHER[:-1], None),
        ({"tool_choice": "required"}, "", None),
        ({"tool_choice": "required"}, "Sure.", False),
        ({"tool_choice": "required"}, f"{WEATHER}\nDone.", False),
        ({"tool_choice": "required"}, WEATHER.replace("weather", "rain"), False),
        ({"tool_choice": "required"}, WEATHER.replace('{"city": "Köln 🌾"}', "{}"), False),
        ({"tool_choice": "required"}, WEATHER.replace('"city": ', '"x": 1, "city": '), False),
        ({"tool_choice": "required"}, PING.replace("{}", '{"x": 1}'), False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, WEATHER, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, f"{WEATHER}\n{ADD}", False),
        ({"tool_choice": named("add")}, ADD, True),
        ({"tool_choice": named("add")}, WEATHER, False),
        ({"tool_choice": named("add")}, f"{ADD}\n{ADD}", False),
        ({"tool_choice": "auto"}, "Sure. <tool_ is no call, nor is </tool_call>", True),
        ({"tool_choice": None}, "", True),
        ({"tool_choice": "auto"}, f"Sure.{WEATHER}\n{ADD}", True),
        ({"tool_choice": "auto"}, f"Sure.{WEATHER} and so on", False),
        ({"tool_choice": "auto"}, "Sure.<tool_call>", None),
        ({"tool_choice": "auto"}, "Sure.<tool_call>no", False),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, f"{WEATHER}\n{ADD}", False),
        ({"tool_choice": "auto", "response_format": form(CITY)}, '{"city": "<tool_call>"}', True),
        ({"tool_choice": "auto", "response_format": form(CITY)}, WEATHER, True),
        ({"tool_choice": "auto", "response_format": form(CITY)}, "Sure.", False),
        ({"tool_choice": "required", "response_format": form(CITY)}, '{"city": ""}', False),
    ],
)
def test_calls_are_taken_as_the_choice_says(fields: dict[str, Any], text: str, taken: bool | None) -> None:
    assert takes(body(tools=TOOLS, **fields), text) is taken


def test_calls_come_to_an_end() -> None:
    required = body(tools=TOOLS, tool_choice="required")
    assert takes(required, "\n".join([PING] * MOST_CALLS)) is True
    assert takes(required, "\n".join([PING] * (MOST_CALLS + 1))) is False


@pytest.mark.parametrize(
    ("asked", "text", "taken"),
    [
        ({"type": "json_object"}, '{"a": [1, {"b": null}], "c": "\\n"}', True),
        ({"type": "json_object"}, "[]", False),
        ({"type": "json_object"}, " {}", False),
        ({"type": "json_object"}, '{"a":  1}', False),
        ({"type": "json_object"}, "{}\n", False),
        (form(CITY), '{"city": "x"}', True),
        (form(CITY), '{"city": "x", "more": 1}', False),
        (form({**CITY, "additionalProperties": True}), '{"city": "x", "more": 1}', True),
        (form({"type": "object"}), '{"more": 1}', True),
        (form({"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2}), '["a", 1]', True),
        (form({"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 2}), '["a", 1, 1]', False),
        (form({"type": "string", "pattern": "^a+$"}), '"aaa"', True),
        (form({"type": "string", "pattern": "^a+$"}), '"b"', False),
        (form({"type": "string", "maxLength": 2}), '"안녕"', True),
        (form({"type": "string", "maxLength": 2}), '"abc"', False),
        (form({"type": "integer"}), "-1000000000000000000", True),
        (form({"type": ["integer", "null"]}), "10000000000000000000", False),
        (form({"type": ["integer", "null"]}), "null", True),
        (form({"type": "integer", "minimum": 3}), "10000000000000000000", True),
        (form({"type": ["integer", "number"]}), "1e400", True),
        (form({"not": {"type": "string"}}), '"what cannot be compiled is best effort"', True),
        (form({"x-guidance": {"whitespace_flexible": True}, **CITY}), '{ "city": "x"}', False),
    ],
)
def test_json_is_taken_as_the_schema_says(asked: dict[str, Any], text: str, taken: bool) -> None:
    assert takes(body(response_format=asked), text) is taken


def test_objects_that_list_their_properties_are_closed_only_where_nothing_else_describes_them() -> None:
    def closed(schema: dict[str, Any]) -> Any:
        plain = json.loads(compilable(schema, "p", strict=False))
        del plain["x-guidance"]
        return plain

    assert closed({"properties": {"a": CITY}})["properties"]["a"] == {**CITY, "additionalProperties": False}
    assert closed({"properties": {"properties": {}, "const": {"const": CITY}}})["properties"]["const"] == {
        "const": CITY
    }
    for kept in (
        {"type": "object"},
        {"properties": {"a": {}}, "required": ["b"]},
        {"properties": {"a": {}}, "patternProperties": {"b": {}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"$defs": {"d": {"properties": {"a": {}}}}, "$ref": "#/$defs/d", "properties": {"b": {}}},
    ):
        assert closed(kept) == kept


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": form(CITY | {"additionalProperties": True}, strict=True)}, "schema", "must be false"),
        ({"response_format": form({"type": "string", "title": "x" * MAX_BYTES})}, "schema", "longer than"),
        ({"response_format": form(None)}, "schema", "JSON object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "JSON object"),
        ({"tools": (tool("f", [1]),)}, "tools[0].function.parameters", "JSON object"),
        ({"tools": ({"type": "function"},)}, "tools[0].function", "JSON object"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "JSON object"),
        (
            {"tools": (tool("a"), tool("b", {**CITY, "additionalProperties": {}}, strict=True))},
            "tools[1].function.parameters",
            "must be false",
        ),
    ],
)
def test_what_needs_no_compiler_to_be_refused_names_its_parameter(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(GrammarRefused, match=words) as caught:
        shape_of(body(**fields))
    assert caught.value.param.endswith(param)


def recursive(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"c": {"$ref": "#"}}, "additionalProperties": False, **more}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        recursive(required=["c"]),
        recursive(required=["c"], properties={"c": {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}}),
        recursive(required=["c"], properties={"c": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}),
    ],
)
def test_what_requires_itself_within_itself_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused, match="no value can satisfy it"):
        compilable(schema, "p", strict=True)
    with pytest.raises(GrammarRefused, match="no value can satisfy it"):
        compilable({**schema, "additionalProperties": True}, "p", strict=False)


@pytest.mark.parametrize(
    "schema",
    [
        recursive(),
        recursive(required=["c"], properties={"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        recursive(required=["c"], properties={"c": {"type": ["object", "null"], "$ref": "#/$defs/d"}}),
        recursive(required=["c"], properties={"c": {"type": "array", "items": {"$ref": "#"}}}),
        {"$ref": "#/components/a", "components": {"a": {"type": "string"}}},
    ],
)
def test_what_may_contain_itself_is_not_refused_for_that(schema: dict[str, Any]) -> None:
    assert compilable(schema, "p", strict=True)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "hiccup"}, "hiccup"),
        ({"type": "string", "pattern": "(("}, "regex parse error"),
        ({"type": "string", "pattern": "^(?=a)b"}, "look-around"),
        ({"$ref": "#/$defs/nowhere"}, "does not exist"),
        ({"$ref": "http://127.0.0.1:1/schema.json"}, "does not fetch"),
        ({"enum": []}, "[Uu]nsatisfiable"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "[Uu]nsatisfiable"),
        ({"enum": [f"value {index}" for index in range(3_500)]}, None),
        ({"not": {}}, "not"),
        ({"const": 10**400}, "number|range"),
        ({"const": "\ud800"}, "surrogate|encode"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_a_strict_schema_is_compiled_or_refused_with_a_reason(schema: dict[str, Any], words: str | None) -> None:
    shape = shape_of(body(response_format=form(schema, strict=True)))
    assert shape is not None
    if words is None:
        VOCABULARY.grammars.compile(shape[0].text)
        return
    with pytest.raises(Uncompilable, match=words) as caught:
        VOCABULARY.grammars.compile(shape[0].text)
    assert len(str(caught.value)) <= 200
    assert "\n" not in str(caught.value)
