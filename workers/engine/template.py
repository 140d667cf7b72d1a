"""A model's chat template: Jinja as the models' own publishers write it, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.engine.errors import ModelUnusable, TemplateRefused
from workers.engine.vocabulary import Messages


class Template:
    """Renders messages up to where the assistant's turn begins."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        # no strftime_now: a prompt that is rendered again tomorrow must have the same tokens (R8)
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as exc:
            raise ModelUnusable(f"the model's chat template can't be read: {exc}") from exc

    def render(self, messages: Messages, tools: Messages) -> str:
        """The prompt as text. TemplateRefused with the template's own words, or the kind of its failure."""
        turns = [_known(message) for message in messages]
        try:
            return self._template.render(
                messages=turns, tools=list(tools) or None, add_generation_prompt=True, **self._tokens
            )
        except TemplateRefused:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as exc:
            raise TemplateRefused(f"it fails on them with {type(exc).__name__}") from exc


def _known(message: Mapping[str, Any]) -> dict[str, Any]:
    """Templates are older than the developer role, which means system, and would print a null content as a word."""
    turn = dict(message)
    if turn.get("role") == "developer":
        turn["role"] = "system"
    if turn.get("content") is None:
        turn["content"] = ""
    return turn


def _refuse(words: str) -> NoReturn:
    raise TemplateRefused(words)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
