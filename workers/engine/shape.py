"""From what a request says of its answer's form to the grammar that binds the answer. Pure.

| asked for | the answer |
|---|---|
| `response_format` json_object, json_schema | one JSON value |
| tools, `tool_choice` required | 1 to 32 calls of any of them |
| tools, a named one | one call of it |
| tools, auto | text, or text and then calls; with a JSON `response_format` one JSON value, or calls |

`parallel_tool_calls: false` makes it one call at most. The form of calls is in `wire.calls`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from wire.calls import BETWEEN, OPENING, TAIL, head_of, may_call, must_call
from wire.messages import Body
from workers.engine.errors import GrammarRefused
from workers.engine.protocol import Grammar
from workers.engine.schema import compilable

MOST_CALLS = 32
_ANYTHING: Mapping[str, Any] = {"type": "object"}
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def shape_of(body: Body) -> tuple[Grammar, dict[str, str]] | None:
    """The grammar, and the schemas in it by parameter; None for plain text. GrammarRefused, with the parameter."""
    answer = _answer(body.response_format) if body.response_format else None
    tools = _tools(body) if may_call(body) else []
    if not tools and answer is None:
        return None
    schemas = {param: schema for _, param, schema in tools}
    if answer is not None and not must_call(body):
        schemas[answer[0]] = answer[1]
    if not tools:
        assert answer is not None
        return Grammar("\n".join(("start: answer", f"answer: %json {answer[1]}"))), schemas
    several = body.parallel_tool_calls and not isinstance(body.tool_choice, dict)
    return _with_calls(tools, None if must_call(body) else answer, must_call(body), several), schemas


def _with_calls(
    tools: Sequence[tuple[str, str, str]], answer: tuple[str, str] | None, must: bool, several: bool
) -> Grammar:
    """Lark: whatever stands in one call's place stands in every one's."""
    lazy = not must and answer is None
    calls = ("" if lazy else f"{_literal(OPENING)} ") + "call" + (f" more{{0,{MOST_CALLS - 1}}}" if several else "")
    rules = [f"start: answer | {calls}" if answer is not None else f"start: {calls}"]
    if answer is not None:
        rules.append(f"answer: %json {answer[1]}")
    if several:
        rules.append(f"more: {_literal(BETWEEN)} call")
    rules.append(f"call: ({' | '.join(f'call_{index}' for index in range(len(tools)))}) {_literal(TAIL)}")
    for index, (name, _, schema) in enumerate(tools):
        rules += (f"call_{index}: {_literal(head_of(name))} args_{index}", f"args_{index}: %json {schema}")
    return Grammar("\n".join(rules), calls=True, lazy=lazy)


def _answer(form: Mapping[str, Any]) -> tuple[str, str] | None:
    """(parameter, schema) of a JSON answer."""
    if form.get("type") == "json_object":
        return "response_format", compilable(_ANYTHING, "response_format", strict=True)
    if form.get("type") != "json_schema":
        return None
    param = "response_format.json_schema.schema"
    described = _mapping(form.get("json_schema"), "response_format.json_schema")
    schema = _mapping(described.get("schema"), param)
    return param, compilable(schema, param, strict=bool(described.get("strict")))


def _tools(body: Body) -> list[tuple[str, str, str]]:
    """(name, parameter, schema) of the tools that may be called."""
    wanted = None
    if isinstance(body.tool_choice, dict):
        wanted = _mapping(body.tool_choice.get("function"), "tool_choice").get("name")
    found = []
    for index, tool in enumerate(body.tools):
        function = _mapping(tool.get("function"), f"tools[{index}].function")
        name, param = str(function.get("name")), f"tools[{index}].function.parameters"
        schema = {"type": "object", **_mapping(function.get("parameters") or _NOTHING, param)}
        if wanted in (None, name):
            found.append((name, param, compilable(schema, param, strict=bool(function.get("strict")))))
    return found


def _mapping(value: Any, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise GrammarRefused("it must be a JSON object", param)
    return value


def _literal(text: str) -> str:
    return json.dumps(text)
