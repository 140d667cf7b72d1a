"""Which answers may hold tool calls, and the form that workers and ingresses agree on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from wire.calls import BETWEEN, CLOSING, OPENING, TAIL, head_of, may_call, must_call
from wire.messages import Body, Sampling

TOOL = {"type": "function", "function": {"name": "ping"}}
NAMED = {"type": "function", "function": {"name": "ping"}}


@pytest.mark.parametrize(
    ("tools", "choice", "may", "must"),
    [
        ((), None, False, False),
        ((), "required", False, False),
        ((TOOL,), None, True, False),
        ((TOOL,), "auto", True, False),
        ((TOOL,), "none", False, False),
        ((TOOL,), "required", True, True),
        ((TOOL,), NAMED, True, True),
    ],
)
def test_the_choice_says_whether_there_may_or_must_be_calls(
    tools: tuple[dict[str, Any], ...], choice: Any, may: bool, must: bool
) -> None:
    body = Body(sampling=Sampling(seed=0), tools=tools, tool_choice=choice)
    assert (may_call(body), must_call(body)) == (may, must)


def test_a_call_is_one_json_object_between_markers() -> None:
    text = OPENING + head_of("ping") + "{}" + TAIL
    assert json.loads(text.removeprefix(OPENING).removesuffix(CLOSING)) == {"name": "ping", "arguments": {}}
    assert BETWEEN.strip() == OPENING
