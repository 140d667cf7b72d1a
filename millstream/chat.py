"""`millstream chat`: one question, its answer as it comes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, TextIO

import httpx

from millstream import runfile
from millstream.errors import Refused, StateBroken
from millstream.state import StateDir

_TIMEOUT = httpx.Timeout(10.0, read=300.0)
_DONE = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask, and how. None = as the API has it."""

    text: str
    model: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    key: str | None = None
    usage: bool = False

    def body(self, model: str) -> dict[str, Any]:
        """The request's body for the API."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        wanted = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        return {
            "model": self.model or model,
            "messages": [*system, {"role": "user", "content": self.text}],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in wanted.items() if value is not None},
        }


def ask(state_dir: Path, question: Question, out: TextIO, err: TextIO) -> None:
    """Stream the answer to `out`. NotRunning without a stack, Refused when the API says no or the stream breaks off."""
    run = runfile.running(state_dir)
    key = question.key or _dev_key(StateDir.at(state_dir))
    usage: dict[str, Any] = {}
    try:
        for event in _events(run.base_url, key, question.body(run.model)):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                out.write(choice["delta"].get("content") or "")
                out.flush()
    except httpx.HTTPError as exc:
        raise Refused(f"the API at {run.base_url} can't be reached ({exc}); see `millstream status`") from exc
    out.write("\n")
    if question.usage:
        err.write(f"{usage.get('prompt_tokens')} prompt tokens, {usage.get('completion_tokens')} completion tokens\n")


def _events(base_url: str, key: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"}
    with (
        httpx.Client(timeout=_TIMEOUT, trust_env=False) as client,
        client.stream("POST", f"{base_url}/chat/completions", json=body, headers=headers) as response,
    ):
        if response.status_code != HTTPStatus.OK:
            response.read()
            raise Refused(f"the API answers {response.status_code}: {_error(response.text)}")
        for line in response.iter_lines():
            text = line.removeprefix("data:").strip()
            if text == _DONE:
                return
            if line.startswith("data:"):
                yield _checked(json.loads(text))
    raise Refused("the answer broke off before its end; ask again, or see `millstream status`")


def _checked(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise Refused(f"the answer ended with an error: {event['error'].get('message')}")
    return event


def _error(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


def _dev_key(state: StateDir) -> str:
    try:
        return state.key_file.read_text().strip()
    except OSError as exc:
        raise StateBroken(f"{state.key_file} can't be read ({exc.strerror}); name a key with --key") from exc
