"""Identifiers, made from a clock and a source of randomness that are passed in."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable

Randbits = Callable[[int], int]


def uuid7(now_ms: int, randbits: Randbits = secrets.randbits) -> str:
    """A UUID version 7 (RFC 9562): 48 bits of milliseconds, then 74 random bits. Sorts by time."""
    value = (now_ms & (1 << 48) - 1) << 80
    value |= 0x7 << 76 | randbits(12) << 64
    value |= 0b10 << 62 | randbits(62)
    return str(uuid.UUID(int=value))


def time_of(name: str) -> int | None:
    """The milliseconds in a UUID version 7; None of any other name."""
    try:
        named = uuid.UUID(name)
    except ValueError:
        return None
    return named.int >> 80 if named.version == 7 else None


def incarnation(now_ms: int, randbits: Randbits = secrets.randbits) -> str:
    """Names one life of a process: later lives sort after earlier ones, no two are the same."""
    return f"{now_ms:012x}{randbits(32):08x}"
