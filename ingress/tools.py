"""Tools of a chat request: validated and passed to the chat template; what can't be guaranteed yet is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ingress.errors import invalid, unsupported

MAX_TOOLS = 128
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema; absent = no parameters"""
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As the chat template reads it."""
        function = {"name": self.function.name, "description": self.function.description or ""}
        return {"type": "function", "function": function | {"parameters": self.function.parameters or _NO_PARAMETERS}}


Tools = Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)]
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def tool_choice(choice: Any, tools: list[Tool]) -> str | None:
    """The `tool_choice` that holds: none, auto, or None without tools. ApiError 400 for the rest.

    A choice that forces a call needs output that is bound to a grammar; until the engine has that it is refused,
    because a client that forces a call can't use an answer in prose.
    """
    if choice is None or choice in ("none", "auto"):
        return choice or ("auto" if tools else None)
    if not tools:
        raise invalid("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")
    if choice == "required":
        raise unsupported("tool_choice", "'tool_choice': 'required' is not supported yet; use 'auto' or 'none'.")
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(named, dict):
        raise invalid("tool_choice", "'tool_choice' must be 'none', 'auto', 'required' or name a function.")
    if named.get("name") not in [tool.function.name for tool in tools]:
        raise invalid("tool_choice", "'tool_choice' names a function that is not in 'tools'.")
    raise unsupported("tool_choice", "A 'tool_choice' that names a function is not supported yet; use 'auto'.")
