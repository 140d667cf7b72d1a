"""What a call used, as OpenAI shows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from wire.messages import End


def usage_of(ends: Iterable[End]) -> dict[str, Any]:
    """The `usage` object of a call: its requests' endings summed up. A prompt counts once however many choices."""
    prompt = cached = completion = 0
    for end in ends:
        prompt += end.prompt_tokens
        cached += end.cached_tokens
        completion += end.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
