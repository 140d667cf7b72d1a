"""The messages of a chat request → what the chat template reads."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ingress.errors import ApiError, invalid, missing, unsupported

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""developer is OpenAI's newer name for system; chat templates know only the older one"""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """What an assistant's tool call called."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """An assistant's call of a tool, as it came back from the client."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class InMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message as a client sends it. Unknown fields are ignored."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


def normalised(messages: list[InMessage]) -> tuple[dict[str, Any], ...]:
    """Messages with one kind of role and content each; ApiError 400 that names the message."""
    if not messages:
        raise invalid("messages", "'messages' must hold at least one message.")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def _message(message: InMessage, at: str) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise invalid(f"{at}.role", f"Invalid value for '{at}.role': use one of {', '.join(sorted(ROLES))}.")
    if role == "tool" and message.tool_call_id is None:
        raise missing(f"{at}.tool_call_id")
    calls = message.tool_calls if role == "assistant" else None
    if message.content is None and not calls:
        raise missing(f"{at}.content")
    out: dict[str, Any] = {"role": role, "content": _content(message.content, role, f"{at}.content")}
    if calls:
        out["tool_calls"] = [msgspec.to_builtins(call) for call in calls]
    if role == "tool":
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def _content(content: str | list[dict[str, Any]] | None, role: str, at: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not content:
        raise invalid(at, f"'{at}' must hold at least one part.")
    return "\n".join(_text(part, role, f"{at}[{index}]") for index, part in enumerate(content))


def _text(part: dict[str, Any], role: str, at: str) -> str:
    kind = part.get("type")
    field = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if kind not in ("text", field):
        raise _refused_part(kind, at)
    text = part.get(field)
    if not isinstance(text, str):
        raise invalid(f"{at}.{field}", f"Invalid value for '{at}.{field}': expected a string.", "invalid_type")
    return text


def _refused_part(kind: Any, at: str) -> ApiError:
    if kind in ("image_url", "input_audio", "file", "image", "video_url", "audio_url"):
        return unsupported(at, f"'{at}' is of type '{kind}', but the models served here read text only.")
    return invalid(f"{at}.type", f"Invalid value for '{at}.type': expected 'text'.")
