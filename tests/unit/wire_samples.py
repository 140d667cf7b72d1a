"""Messages for tests of the wire."""

from __future__ import annotations

from typing import Any

from wire.fleet import Fleet
from wire.messages import Begin, Body, ReplyTo, Request, Sampling, request_ref

FLEET = Fleet("local", "cpu", "m", "1", "sim")


def request(offset_name: str = "r", *, n: int = 1, **changes: Any) -> Request:
    """A small chat request."""
    fields: dict[str, Any] = {
        "request_id": offset_name,
        "attempt": 1,
        "tenant": "t",
        "project": "p",
        "key_id": "k",
        "model": "m",
        "version": "1",
        "body": Body(sampling=Sampling(seed=1), prompt="hello", n=n),
        "reply": ReplyTo(region="local", slot=0, incarnation="i"),
        "created_ms": 1_000,
        "accept_by_ms": 2_000,
        "deadline_ms": 3_000,
    }
    return Request(**fields | changes)


def begin(offset: int, *, epoch: int = 0, n: int = 1, at_ms: int = 1_100) -> Begin:
    """A Begin of the request at this offset of the interactive lane."""
    return Begin(
        epoch=epoch,
        ref=request_ref("requests", offset),
        request=request(f"r{offset}", n=n),
        prompt_tokens=5,
        cached_tokens=2,
        at_ms=at_ms,
    )
