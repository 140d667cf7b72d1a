"""Tools of a chat request: validated, and as the chat template and the engine's grammar read them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ingress.errors import invalid

MAX_TOOLS = 128
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON Schema of an object; absent = no parameters"""
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As the chat template reads it; `strict` only where it is asked for."""
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        function["parameters"] = self.function.parameters or _NO_PARAMETERS
        return {"type": "function", "function": function | ({"strict": True} if self.function.strict else {})}


Tools = Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)]
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def check_tools(tools: list[Tool]) -> None:
    """ApiError 400 for a name that is there twice, and for parameters that are no object."""
    names = set()
    for index, tool in enumerate(tools):
        at, function = f"tools[{index}].function", tool.function
        if function.name in names:
            raise invalid(f"{at}.name", f"'{at}.name' is the name of another tool too.")
        if (function.parameters or _NO_PARAMETERS).get("type", "object") != "object":
            raise invalid(f"{at}.parameters", f"'{at}.parameters' must be a JSON Schema of type 'object'.")
        names.add(function.name)


class _Named(msgspec.Struct, frozen=True):
    name: str


class _Allowed(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: _Named


class _Allowance(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Allowed], Meta(min_length=1)]


def allowed(choice: Any, tools: list[Tool]) -> tuple[Any, list[Tool]]:
    """A `tool_choice` of type allowed_tools is its mode, and of the tools those that it names; any other stays as it
    is, and all tools. ApiError 400."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, tools
    try:
        allowance = msgspec.convert(choice.get("allowed_tools"), _Allowance)
    except msgspec.ValidationError as exc:
        raise invalid("tool_choice", f"'tool_choice.allowed_tools': {exc}.") from exc
    names = {one.function.name for one in allowance.tools}
    unknown = names - {tool.function.name for tool in tools}
    if unknown:
        raise invalid("tool_choice", f"'tool_choice' allows {min(unknown)!r}, which is not in 'tools'.")
    return allowance.mode, [tool for tool in tools if tool.function.name in names]


def tool_choice(choice: Any, tools: list[Tool]) -> Any:
    """The `tool_choice` that holds: none, auto, required, or the named function; None without tools. ApiError 400."""
    if choice is None or choice in ("none", "auto"):
        return choice or ("auto" if tools else None)
    if not tools:
        raise invalid("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")
    if choice == "required":
        return "required"
    named = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(named, dict):
        raise invalid(
            "tool_choice", "'tool_choice' must be 'none', 'auto', 'required', name a function, or allow some."
        )
    if named.get("name") not in [tool.function.name for tool in tools]:
        raise invalid("tool_choice", "'tool_choice' names a function that is not in 'tools'.")
    return {"type": "function", "function": {"name": named["name"]}}
