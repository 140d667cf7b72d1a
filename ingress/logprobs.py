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


def legacy_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """The `logprobs` object of a completions choice; `offset` is where in the text the first token starts."""
    offsets = []
    for one in logprobs:
        offsets.append(offset)
        offset += len(one.token)
    return {
        "tokens": [one.token for one in logprobs],
        "token_logprobs": [_finite(one.logprob) for one in logprobs],
        "top_logprobs": [
            {top.token: _finite(top.logprob) for top in one.top} | {one.token: _finite(one.logprob)} for one in logprobs
        ],
        "text_offset": offsets,
    }


def _top(one: TokenLogprob) -> list[dict[str, Any]]:
    return [_chat_token(top) for top in one.top]


def _chat_token(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.token, "logprob": _finite(one.logprob), "bytes": list(one.bytes)}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
