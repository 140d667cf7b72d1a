"""Usages for tests."""

from __future__ import annotations

from typing import Any

from wire.fleet import Fleet
from wire.messages import Usage

FLEET = Fleet("local", "cpu", "simulated", "1", "sim")
NOON_MS = 1_767_268_800_000
"""2026-01-01 12:00 UTC"""


def usage(request_id: str = "r1", **changes: Any) -> Usage:
    """A finished attempt: 10 prompt tokens, 4 of them cached, 7 generated."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 1,
        "tenant": "acme",
        "project": "p",
        "key_id": "k",
        "model": "simulated",
        "version": "1",
        "tier": "default",
        "lane": "requests",
        "fleet": FLEET,
        "shard": 0,
        "ref": 2,
        "begin_offset": 3,
        "finish_offset": 5,
        "reason": "stop",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "completion_tokens": 7,
        "created_ms": NOON_MS,
        "begun_ms": NOON_MS + 5,
        "first_token_ms": NOON_MS + 20,
        "finished_ms": NOON_MS + 90,
    }
    return Usage(**(values | changes))
