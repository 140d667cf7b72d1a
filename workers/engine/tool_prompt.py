"""Tools and tool calls in a prompt. Pure.

A template that writes calls as `wire.calls` has them is given tools and calls as they are. Any other, and one that
leaves tools out, gets them as text of ordinary messages: what the model is told is then what its answer is bound to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wire.calls import CLOSING, OPENING, TAIL, head_of
from workers.engine.errors import TemplateRefused

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, Messages], str]
_USER = {"role": "user", "content": "Hello"}
_PROBE = "millstream_probe"
_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}},
}
_TOLD = f"""\
You may call functions to help with the user's request. These are the functions, each described by a JSON object:
%s

To call one, write its name and its arguments as a JSON object, and nothing after it but further calls:
{OPENING}
{{"name": "…", "arguments": {{…}}}}
{CLOSING}"""


class ToolPrompt:
    """How one template is told of tools."""

    def __init__(self, render: Render) -> None:
        """Finds out what the template can do by rendering small chats."""
        with_tool = _tried(render, [_USER], [_TOOL])
        called = _tried(render, [_USER, _call(), _result(), _USER], [_TOOL])
        self.native = _PROBE in with_tool and f"{OPENING}{head_of(_PROBE)}" in called
        """the template itself writes tools, and calls in our form"""
        self._takes_system = bool(_tried(render, [{"role": "system", "content": _PROBE}, _USER], []))
        self._takes_results = _PROBE in _tried(render, [_USER, _plain_call(_call()), _result(), _USER], [])

    def adapted(self, messages: Messages, tools: Messages) -> tuple[list[Mapping[str, Any]], Messages]:
        """What to render instead: messages and tools as the template understands them."""
        if self.native:
            return [_with_arguments(message) for message in messages], [_shown(tool) for tool in tools]
        turns = [self._plain(message) for message in messages]
        if tools:
            self._tell(turns, _TOLD % "\n".join(json.dumps(_bare(tool), ensure_ascii=False) for tool in tools))
        return turns, ()

    def _tell(self, turns: list[Mapping[str, Any]], words: str) -> None:
        """Put the words into the system message; without one, into a new one or the first user's."""
        role = "system" if self._takes_system else "user"
        at = next((index for index, turn in enumerate(turns) if turn.get("role") in (role, "developer")), None)
        if at is not None and (at == 0 or not self._takes_system):
            own = turns[at].get("content") or ""
            parts = (own, words) if self._takes_system else (words, own)
            turns[at] = {**turns[at], "content": "\n\n".join(filter(None, parts))}
        else:
            turns.insert(0, {"role": role, "content": words})

    def _plain(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message.get("role") == "assistant" and message.get("tool_calls"):
            return _plain_call(message)
        if message.get("role") == "tool" and not self._takes_results:
            return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
        return message


def _plain_call(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message with its calls as text, as the model wrote them."""
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [f"{OPENING}{head_of(function['name'])}{function['arguments']}{TAIL}" for function in functions]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": (message.get("content") or "") + "\n".join(calls)}


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Templates write a call's arguments as JSON: what OpenAI's API has as a string of JSON must be taken apart."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _taken_apart(call["function"])} for call in calls]}


def _taken_apart(function: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function


def _shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {**tool, "function": _bare(tool)}


def _bare(tool: Mapping[str, Any]) -> dict[str, Any]:
    """What of a tool's function concerns the model."""
    return {name: value for name, value in tool["function"].items() if name != "strict"}


def _tried(render: Render, messages: Messages, tools: Messages) -> str:
    try:
        return render([_with_arguments(message) for message in messages], tools)
    except TemplateRefused:
        return ""


def _call() -> dict[str, Any]:
    function = {"name": _PROBE, "arguments": "{}"}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def _result() -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "name": _PROBE, "content": _PROBE}
