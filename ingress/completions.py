"""The body of POST /v1/completions: bytes in, a Call out. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from ingress.call import Call
from ingress.errors import ApiError, invalid, missing, unsupported
from ingress.params import MAX_N, DrawSeed, Params
from ingress.parse import convert, json_object
from wire.messages import Body

Prompt = str | tuple[int, ...]
DEFAULT_MAX_TOKENS = 16
"""OpenAI's"""
_TEXT_FOR_ECHO = "'echo' needs the prompt as text, not as token ids."


class CompletionBody(Params, frozen=True, kw_only=True):
    """The fields that change an answer; the others are accepted and ignored."""

    prompt: str | list[Any] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None


def parse_completions(raw: bytes, draw_seed: DrawSeed) -> Call:
    """A completion request's Call: one body a prompt. ApiError 400 with `param` for what can't be done as asked."""
    asked = convert(json_object(raw), CompletionBody)
    if asked.prompt is None:
        raise missing("prompt")
    max_tokens = asked.max_tokens or DEFAULT_MAX_TOKENS
    asked.check(max_tokens)
    if asked.suffix:
        raise unsupported("suffix", "'suffix' is not supported; leave it out.")
    prompts = _prompts(asked.prompt)
    if len(prompts) * (asked.n or 1) > MAX_N:
        raise invalid("n", f"'n' times the number of prompts must be at most {MAX_N}.")
    bodies = tuple(_body(asked, prompt, max_tokens, draw_seed) for prompt in prompts)
    return Call(
        model=asked.model,
        bodies=bodies,
        stream=bool(asked.stream),
        include_usage=asked.include_usage,
        tier=asked.tier,
        echo=_echo(asked, prompts),
        endpoint="completions",
    )


def _body(asked: CompletionBody, prompt: Prompt, max_tokens: int, draw_seed: DrawSeed) -> Body:
    return Body(
        prompt=prompt,
        sampling=asked.sampling(draw_seed),
        stop=asked.stops(),
        n=asked.n or 1,
        max_tokens=max_tokens,
        min_tokens=asked.min_tokens or 0,
        ignore_eos=bool(asked.ignore_eos),
        logprobs=asked.logprobs,
        prompt_logprobs=asked.logprobs if asked.echo else None,
    )


def _echo(asked: CompletionBody, prompts: tuple[Prompt, ...]) -> tuple[str, ...]:
    if not asked.echo:
        return ()
    texts = tuple(prompt for prompt in prompts if isinstance(prompt, str))
    if len(texts) != len(prompts):
        raise unsupported("echo", _TEXT_FOR_ECHO)
    return texts


def _prompts(prompt: str | list[Any]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (_text(prompt),)
    if not prompt:
        raise invalid("prompt", "'prompt' must not be empty.")
    if _is_ids(prompt):
        return (_ids(prompt),)
    if len(prompt) > MAX_N:
        raise invalid("prompt", f"'prompt' must hold at most {MAX_N} prompts.")
    if all(isinstance(one, str) for one in prompt):
        return tuple(_text(one) for one in prompt)
    if all(isinstance(one, list) and _is_ids(one) for one in prompt):
        return tuple(_ids(one) for one in prompt)
    raise _wrong_prompt()


def _text(prompt: str) -> str:
    if not prompt:
        raise invalid("prompt", "'prompt' must not be an empty string.")
    return prompt


def _is_ids(prompt: list[Any]) -> bool:
    return all(type(one) is int for one in prompt)


def _ids(prompt: list[int]) -> tuple[int, ...]:
    if not prompt:
        raise invalid("prompt", "'prompt' must not hold an empty list of token ids.")
    if not 0 <= min(prompt) <= max(prompt) < 2**31:
        raise invalid("prompt", "'prompt' holds a token id that no vocabulary has.")
    return tuple(prompt)


def _wrong_prompt() -> ApiError:
    return invalid(
        "prompt",
        "'prompt' must be a string, a list of strings, a list of token ids, or a list of such lists.",
        "invalid_type",
    )
