"""What arrives, and when. Readers of published traces take lines; opening files is the caller's."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import count, islice

PREFIX_TOKENS = 512
"""Tokens that one number of a prompt's prefix stands for"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request as the world sends it."""

    number: int
    """its place in the trace"""
    at_ms: float
    prompt_tokens: int
    output_tokens: int
    """known to the engine that generates them, not to a policy"""
    prefix: tuple[int, ...]
    """a number for every PREFIX_TOKENS of the prompt begun; it names all before it, too"""
    region: str = ""
    priority: int = 0
    """the higher, the later it is shed"""
    attempt: int = 1


def mooncake(lines: Iterable[str | bytes], *, speed: float = 1.0) -> list[Arrival]:
    """The format of the Mooncake traces: JSON lines with timestamp (ms), input_length, output_length, hash_ids."""
    return [
        Arrival(
            number=number,
            at_ms=row["timestamp"] / speed,
            prompt_tokens=row["input_length"],
            output_tokens=row["output_length"],
            prefix=tuple(row["hash_ids"]),
        )
        for number, row in enumerate(map(json.loads, lines))
    ]


def azure(lines: Iterable[str], *, speed: float = 1.0) -> list[Arrival]:
    """The format of the Azure LLM traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens.

    It says nothing about prompts' contents, so none begins like another.
    """
    first: datetime | None = None
    fresh = count()
    arrivals = []
    for number, row in enumerate(csv.DictReader(lines)):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the seventh digit of a second is more than it takes
        first = first or at
        prompt = int(row["ContextTokens"])
        arrivals.append(
            Arrival(
                number=number,
                at_ms=(at - first).total_seconds() * 1000 / speed,
                prompt_tokens=max(prompt, 1),
                output_tokens=max(int(row["GeneratedTokens"]), 1),
                prefix=tuple(islice(fresh, -(-prompt // PREFIX_TOKENS))),
            )
        )
    return arrivals
