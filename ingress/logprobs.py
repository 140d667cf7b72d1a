"""Log probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wire.messages import TokenLogprob

LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON doesn't have"""


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice or delta."""
    return {"content": [_chat_token(one) | {"top_logprobs": _top(one)} for one in logprobs], "refusal": None}


def legacy_logprobs(
    logprobs: Sequence[TokenLogprob], offset: int, prompt: Sequence[TokenLogprob] = ()
) -> dict[str, Any]:
    """The `logprobs` object of a completions choice; `offset` is where in the text the first token starts.

    `prompt`: the prompt's tokens, before the completion's. Nothing comes before the first: its logprob is null.
    """
    every = [*prompt, *logprobs]
    known = [None, *every[1:]] if prompt else every
    offsets = []
    for one in every:
        offsets.append(offset)
        offset += len(one.token)
    return {
        "tokens": [_legacy_token(one) for one in every],
        "token_logprobs": [one and _finite(one.logprob) for one in known],
        "top_logprobs": [one and _legacy_top(one) for one in known],
        "text_offset": offsets,
    }


def _legacy_top(one: TokenLogprob) -> dict[str, float]:
    return {_legacy_token(each): _finite(each.logprob) for each in (*one.top, one)}


def _legacy_token(one: TokenLogprob) -> str:
    """Its text, or as OpenAI writes what is only a part of a character: `bytes:\\xf0\\x9f`. Keys must differ."""
    whole = "\ufffd" not in one.token or one.token.encode("utf-8", "surrogatepass") == bytes(one.bytes)
    return one.token if whole else "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.bytes)


def _top(one: TokenLogprob) -> list[dict[str, Any]]:
    return [_chat_token(top) for top in one.top]


def _chat_token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": _finite(one.logprob), "bytes": list(one.bytes)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
