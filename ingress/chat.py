"""The body of POST /v1/chat/completions: bytes in, a Call out. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from ingress.call import Call
from ingress.conversation import InMessage, normalised
from ingress.errors import invalid, missing, unsupported
from ingress.params import DrawSeed, Params, Tokens
from ingress.parse import convert, json_object
from ingress.response_format import response_format
from ingress.tools import Tools, allowed, check_tools, tool_choice
from wire.messages import Body


class ChatBody(Params, frozen=True, kw_only=True):
    """The fields that change an answer; the others (store, metadata, user, …) are accepted and ignored."""

    messages: list[InMessage] | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    web_search_options: dict[str, Any] | None = None


def parse_chat(raw: bytes, draw_seed: DrawSeed) -> Call:
    """A chat request's Call. ApiError 400 with `param` for whatever can't be done as asked."""
    chat = convert(json_object(raw), ChatBody)
    if chat.messages is None:
        raise missing("messages")
    # The newer name wins: benchmarks send both.
    max_tokens = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    chat.check(max_tokens)
    _check_unsupported(chat)
    check_tools(chat.tools or [])
    choice, tools = allowed(chat.tool_choice, chat.tools or [])
    body = Body(
        sampling=chat.sampling(draw_seed),
        messages=normalised(chat.messages),
        stop=chat.stops(),
        n=chat.n or 1,
        max_tokens=max_tokens,
        min_tokens=chat.min_tokens or 0,
        ignore_eos=bool(chat.ignore_eos),
        tools=tuple(tool.plain() for tool in tools),
        tool_choice=tool_choice(choice, tools),
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        response_format=response_format(chat.response_format),
        logprobs=_logprobs(chat),
    )
    return Call(
        model=chat.model,
        bodies=(body,),
        stream=bool(chat.stream),
        include_usage=chat.include_usage,
        tier=chat.tier,
        endpoint="chat",
    )


def _logprobs(chat: ChatBody) -> int | None:
    if chat.top_logprobs is not None and not chat.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return (chat.top_logprobs or 0) if chat.logprobs else None


def _check_unsupported(chat: ChatBody) -> None:
    if set(chat.modalities or ["text"]) != {"text"}:
        raise unsupported("modalities", "'modalities' other than 'text' are not supported.")
    if chat.functions:
        raise unsupported("functions", "'functions' is deprecated and not supported; use 'tools'.")
    if chat.function_call is not None:
        raise unsupported("function_call", "'function_call' is deprecated and not supported; use 'tool_choice'.")
    if chat.web_search_options is not None:
        raise unsupported("web_search_options", "'web_search_options' is not supported; leave it out.")
