"""Deltas → one JSON answer, for a call that isn't streamed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from ingress.call import Call
from ingress.call_chunks import message_of
from ingress.logprobs import chat_logprobs, legacy_logprobs
from ingress.usage import usage_of
from wire.calls import may_call
from wire.messages import ChoiceEnd, Delta, End, TokenLogprob


class _Choice:
    """What one choice has so far."""

    __slots__ = ("end", "logprobs", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: ChoiceEnd | None = None


class Whole:
    """Gathers a call's choices."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._choices = [_Choice() for _ in range(call.choices)]
        self._prompts: dict[int, tuple[TokenLogprob, ...]] = {}
        """by body: the prompt's tokens, where asked for"""

    def delta(self, choice: int, delta: Delta) -> None:
        """Take new tokens of a choice."""
        into = self._choices[choice]
        into.texts.append(delta.text)
        into.logprobs.extend(delta.logprobs or ())
        into.end = delta.end
        if delta.prompt is not None:
            self._prompts[choice // self._call.n] = delta.prompt

    def body(self, fields: dict[str, Any], ends: Iterable[End]) -> bytes:
        """The answer; `fields` are those that streams have too (id, created, model, system_fingerprint)."""
        chat = self._call.endpoint == "chat"
        choices = [
            self._chat(index, choice, fields["id"]) if chat else self._text(index, choice)
            for index, choice in enumerate(self._choices)
        ]
        kind = {"object": "chat.completion", "service_tier": self._call.tier} if chat else {"object": "text_completion"}
        return orjson.dumps({**fields, **kind, "choices": choices, "usage": usage_of(ends)})

    def _chat(self, index: int, choice: _Choice, answer_id: str) -> dict[str, Any]:
        body, text = self._call.bodies[0], "".join(choice.texts)
        plain: dict[str, Any] = {"content": text, "refusal": None}
        said = message_of(body, answer_id, index, text, choice.end) if may_call(body) else plain
        return {
            "index": index,
            "message": {"role": "assistant", **said},
            "logprobs": chat_logprobs(choice.logprobs) if body.logprobs is not None else None,
            "finish_reason": choice.end,
        }

    def _text(self, index: int, choice: _Choice) -> dict[str, Any]:
        asked = self._call.bodies[0].logprobs is not None
        body = index // self._call.n
        echo = self._call.echo[body] if self._call.echo else ""
        prompt = self._prompts.get(body, ())
        return {
            "index": index,
            "text": echo + "".join(choice.texts),
            "logprobs": legacy_logprobs(choice.logprobs, 0, prompt) if asked else None,
            "finish_reason": choice.end,
        }
