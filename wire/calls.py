"""How a model writes tool calls: what workers bind its text to, and what an ingress reads it by. Pure.

    text <tool_call>
    {"name": "…", "arguments": {…}}
    </tool_call>
    <tool_call> …

Text may come before the first call (`tool_choice` auto only), nothing but further calls after it. This is the form
that Hermes, Qwen and SmolLM models were trained on; a model whose chat template speaks of another is told of this one.
"""

from __future__ import annotations

from wire.messages import Body

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


def may_call(body: Body) -> bool:
    """Whether the answer may hold tool calls."""
    return bool(body.tools) and body.tool_choice != "none"


def must_call(body: Body) -> bool:
    """Whether the answer is nothing but tool calls."""
    return may_call(body) and body.tool_choice not in (None, "auto")


def head_of(name: str) -> str:
    """What a call says between its opening and its arguments. `name`: letters, digits, `_` and `-`."""
    return f'\n{{"name": "{name}", "arguments": '


TAIL = "}\n" + CLOSING
"""what follows a call's arguments"""
BETWEEN = "\n" + OPENING
"""what follows a call when another one does"""
