"""From a Request to what an engine runs: template, tokens, and what only the model can validate. Pure."""

from __future__ import annotations

from typing import Any

from wire.calls import may_call
from wire.messages import Refusal, Request
from workers.coverage import links_of
from workers.effects import Prepared
from workers.engine.errors import GrammarRefused, TemplateRefused, Uncompilable
from workers.engine.protocol import Grammar
from workers.engine.shape import shape_of
from workers.engine.vocabulary import Vocabulary, names_token

INLINE_CHARACTERS = 4_000
"""prompts up to this are tokenised in the event loop: cheaper than a thread's hop, and well under a step's time"""

MOST_PROMPT_LOGPROBS = 60_000
"""what an answer's record has room for"""


def prompt_characters(request: Request) -> int:
    """How much text must be tokenised, at most."""
    body = request.body
    if isinstance(body.prompt, tuple):
        return 0
    return _characters(body.prompt) + _characters(body.messages) + _characters(body.tools)


def is_quick(request: Request) -> bool:
    """Whether `prepare` takes too little time to leave the event loop for it."""
    body = request.body
    return prompt_characters(request) <= INLINE_CHARACTERS and not body.response_format and not may_call(body)


def _characters(value: Any) -> int:
    """Of all strings in a plain value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + _characters(inner) for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_characters, value))
    return 0


def prepare(request: Request, vocabulary: Vocabulary, context_tokens: int, slots: int) -> Prepared | Refusal:
    """The prompt's tokens and how many may follow, or why the model can't run it.

    `max_tokens` is an upper bound: where prompt and bound exceed the context, what the context leaves counts.
    """
    param = "messages" if request.body.messages else "prompt"
    # Megabytes of text would keep the worker busy for seconds only to be too long: what surely is isn't tokenised.
    at_least = prompt_characters(request) // vocabulary.longest_token_bytes
    if at_least >= context_tokens:
        return _too_long(f"more than {at_least}", context_tokens, param)
    try:
        shape = shape_of(request.body)
        prompt = _tokens(request, vocabulary)
    except GrammarRefused as exc:
        return _unusable(exc)
    except TemplateRefused as exc:
        return _invalid(f"The model's chat template refuses these messages: {exc}", "messages")
    if not prompt:
        return _invalid("The prompt is empty; send at least one token.", param)
    if any(not 0 <= token < vocabulary.vocab_size for token in prompt):
        return _invalid(f"The prompt holds a token id outside 0 to {vocabulary.vocab_size - 1}.", param)
    room = context_tokens - len(prompt)
    if room < 1:
        return _too_long(str(len(prompt)), context_tokens, param)
    if request.body.n > slots:
        return _invalid(f"n is {request.body.n}; this model's engines run at most {slots} choices at once.", "n")
    shown = (1 + (request.body.prompt_logprobs or 0)) * len(prompt)
    if request.body.prompt_logprobs is not None and shown > MOST_PROMPT_LOGPROBS:
        return _invalid(
            f"'echo' with 'logprobs' would return {shown} logprobs of the prompt; {MOST_PROMPT_LOGPROBS} are the most.",
            "logprobs",
        )
    unknown = [token for token in request.body.sampling.logit_bias if not names_token(token, vocabulary.vocab_size)]
    if unknown:
        return _invalid(
            f"'logit_bias' names a token {unknown[0][:20]!r}; ids are from 0 to {vocabulary.vocab_size - 1}.",
            "logit_bias",
        )
    try:
        grammar = None if shape is None else _checked(*shape, vocabulary)
    except GrammarRefused as exc:
        return _unusable(exc)
    wanted = request.body.max_tokens
    return Prepared(
        prompt=prompt,
        max_tokens=room if wanted is None else min(wanted, room),
        grammar=grammar,
        links=links_of(request, prompt, vocabulary.token_bytes),
    )


def _checked(grammar: Grammar, schemas: dict[str, str], vocabulary: Vocabulary) -> Grammar:
    """What binds the answer; compiled here, so that one that can't be is known before the request is taken on."""
    try:
        vocabulary.grammars.compile(grammar.text)
    except Uncompilable as exc:
        raise _culprit(schemas, vocabulary, exc) from exc
    return grammar


def _culprit(schemas: dict[str, str], vocabulary: Vocabulary, whole: Uncompilable) -> GrammarRefused:
    """The schema that is to blame, or the first if only all of them together are too much."""
    for param, schema in schemas.items():
        try:
            vocabulary.grammars.check_schema(schema)
        except Uncompilable as exc:
            return GrammarRefused(str(exc), param)
    return GrammarRefused(str(whole), next(iter(schemas)))


def _tokens(request: Request, vocabulary: Vocabulary) -> tuple[int, ...]:
    body = request.body
    if isinstance(body.prompt, tuple):
        return body.prompt
    if isinstance(body.prompt, str):
        return vocabulary.encode_text(body.prompt)
    return vocabulary.encode_chat(body.messages, body.tools if may_call(body) else ())


def _unusable(error: GrammarRefused) -> Refusal:
    return _invalid(f"The schema '{error.param}' can't be used: {error}.", error.param)


def _invalid(message: str, param: str) -> Refusal:
    return Refusal(status=400, code="invalid_value", message=message, param=param)


def _too_long(prompt_tokens: str, context_tokens: int, param: str) -> Refusal:
    return Refusal(
        status=400,
        code="context_length_exceeded",
        message=(
            f"This model's maximum context length is {context_tokens} tokens, and '{param}' takes {prompt_tokens}; "
            f"shorten it to leave room for at least one token."
        ),
        param=param,
    )


def overloaded(waiting: int) -> Refusal:
    """The engine's queue is full; another fleet may have room."""
    return Refusal(
        status=429,
        code="engine_overloaded",
        message=f"The engine is over capacity: {waiting} requests wait already; send this one again shortly.",
        retry_after_s=1,
        elsewhere=True,
    )


DRAINING = Refusal(
    status=503,
    code="engine_draining",
    message="The engine is shutting down; send the request again shortly.",
    retry_after_s=2,
    elsewhere=True,
)
