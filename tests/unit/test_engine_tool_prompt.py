"""Tools in prompts: templates that know them, and templates that don't, that refuse roles, or speak of another form."""

from __future__ import annotations

from typing import Any

import pytest

from wire.calls import OPENING, TAIL, head_of
from workers.engine.errors import TemplateRefused
from workers.engine.template import Template
from workers.engine.tool_prompt import ToolPrompt

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
HERMES = (
    "{% if tools %}[tools]{% for t in tools %}{{ t | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{{ '\n' }}{% endfor %}"
)
LLAMA = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": …}{% endfor %}'
    "{{ '\n' }}{% endfor %}"
)
STERN = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
USER = {"role": "user", "content": "1+1?"}
CHAT = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]


def rendered(source: str, messages: Any, tools: Any = ()) -> str:
    template = Template(source, {})
    return template.render(*ToolPrompt(template.render).adapted(messages, tools))


def test_a_template_that_writes_our_form_is_given_tools_and_calls_as_they_are() -> None:
    text = rendered(HERMES, CHAT, [TOOL])
    assert text.startswith('[tools]{"type": "function", "function": {"name": "add", "description": "Adds."')
    assert "strict" not in text, "how an answer is bound is no matter of the model's"
    assert f'[assistant]{OPENING}{head_of("add")}{{"a": 1}}{TAIL}' in text


def test_arguments_that_are_no_object_are_passed_on_as_they_came() -> None:
    for arguments in ("no json", "[1]"):
        call = {**CALL, "function": {"name": "add", "arguments": arguments}}
        assert arguments in rendered(HERMES, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("source", [PLAIN, LLAMA], ids=["plain", "llama"])
def test_any_other_is_told_in_a_system_message(source: str) -> None:
    text = rendered(source, CHAT, [TOOL])
    assert text.startswith("[system]You may call functions")
    assert '{"name": "add", "description": "Adds.", "parameters": {"type": "object"}}' in text
    assert f'[assistant]{OPENING}{head_of("add")}{{"a":1}}{TAIL}\n[tool]2\n' in text
    with_own = rendered(source, [{"role": "system", "content": "Be brief."}, *CHAT], [TOOL])
    assert with_own.startswith("[system]Be brief.\n\nYou may call functions")
    assert with_own.count("[system]") == 1


def test_without_tools_nothing_is_said_of_them() -> None:
    for source in (PLAIN, HERMES, LLAMA, STERN):
        assert rendered(source, [USER]) == "[user]1+1?\n"


def test_a_template_without_system_and_tool_roles_gets_users_words() -> None:
    text = rendered(STERN, CHAT, [TOOL])
    assert text.startswith("[user]You may call functions")
    assert "</tool_call>\n\n1+1?\n[assistant]<tool_call>" in text
    assert text.endswith("[user]<tool_response>\n2\n</tool_response>\n")
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        rendered(STERN, [{"role": "system", "content": "Be brief."}, USER])


def test_text_before_a_call_stays_before_it() -> None:
    said = {"role": "assistant", "content": "Let me see. ", "tool_calls": [CALL, CALL]}
    assert f"[assistant]Let me see. {OPENING}" in rendered(PLAIN, [USER, said])
    assert rendered(PLAIN, [USER, said]).count(OPENING) == 2
