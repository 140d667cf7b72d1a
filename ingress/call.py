"""What an HTTP call asks for, whichever endpoint it came in on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.messages import Body

Endpoint = Literal["chat", "completions"]
Tier = Literal["default", "flex"]
PRIORITIES: dict[Tier, int] = {"default": 0, "flex": -1}
"""the lower, the sooner refused when engines are full"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP call. Each body becomes a request of its own; its choice k is the call's choice `body index · n + k`."""

    endpoint: Endpoint
    model: str
    bodies: tuple[Body, ...]
    """at least one; all have the same n"""
    stream: bool
    include_usage: bool
    tier: Tier = "default"
    echo: tuple[str, ...] = ()
    """by body: the prompt's text, shown before the completion; empty = not asked for"""

    @property
    def n(self) -> int:
        return self.bodies[0].n

    @property
    def choices(self) -> int:
        return len(self.bodies) * self.n
