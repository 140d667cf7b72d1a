"""Traffic made up: conversations of several turns over shared system prompts. The same seed gives the same requests.

Sessions begin at random (Poisson). Each has one of a few system prompts, some of them far more popular than others, and
turns at random distances. A turn's prompt is all that was said before and a new message, so it begins like the one
before it. Some sessions bring a document. Lengths are lognormal, as in published chat traces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from routing.simulator.trace import PREFIX_TOKENS, Arrival

_SESSION_PIECES = 1 << 20
"""Numbers of one session's pieces"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What sessions are like; (median, sigma) of lognormal distributions."""

    sessions_per_s: float = 0.55
    """times `turns` requests a second"""
    turns: float = 4.0
    """of a session, on average (geometric)"""
    pause_s: tuple[float, float] = (20.0, 1.0)
    """from a turn to the next"""
    message_tokens: tuple[float, float] = (120.0, 1.3)
    answer_tokens: tuple[float, float] = (220.0, 0.9)
    document_tokens: tuple[float, float] = (12_000.0, 0.8)
    documents: float = 0.25
    """share of the sessions that bring one"""
    systems: int = 24
    """system prompts; the k-th is 1/k as popular as the first"""
    system_tokens: tuple[float, float] = (1_500.0, 0.7)
    longest_tokens: int = 120_000
    """A session ends before its prompt gets longer"""


CHAT = Traffic()


def generate(seconds: float, *, traffic: Traffic = CHAT, seed: int = 0, speed: float = 1.0) -> list[Arrival]:
    """The requests of so many seconds, which `speed` presses together, in order of time."""
    draw = Random(seed)
    systems = [_lognormal(draw, traffic.system_tokens) for _ in range(traffic.systems)]
    popular = [1 / (place + 1) for place in range(traffic.systems)]
    turns: list[tuple[float, int, int, tuple[int, ...]]] = []
    at_s, session = 0.0, 0
    while (at_s := at_s + draw.expovariate(traffic.sessions_per_s)) < seconds:
        session += 1
        system = draw.choices(range(traffic.systems), popular)[0]
        turns += (turn for turn in _turns(draw, traffic, at_s, session, system, systems[system]) if turn[0] < seconds)
    turns.sort()
    return [
        Arrival(number=number, at_ms=at_s * 1000 / speed, prompt_tokens=prompt, output_tokens=answer, prefix=prefix)
        for number, (at_s, prompt, answer, prefix) in enumerate(turns)
    ]


def _turns(
    draw: Random, traffic: Traffic, at_s: float, session: int, system: int, system_tokens: int
) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    """(time, prompt, answer, prefix) of a session's turns."""
    shared = tuple(system * _SESSION_PIECES + place for place in range(system_tokens // PREFIX_TOKENS))
    first = (traffic.systems + session) * _SESSION_PIECES
    prompt = system_tokens + (_lognormal(draw, traffic.document_tokens) if draw.random() < traffic.documents else 0)
    turn = 0
    while True:
        prompt += _lognormal(draw, traffic.message_tokens)
        if prompt > traffic.longest_tokens:
            return
        answer = _lognormal(draw, traffic.answer_tokens)
        whole = prompt // PREFIX_TOKENS
        own = tuple(first + place for place in range(len(shared), whole))
        turn += 1
        last = (first + _SESSION_PIECES - turn,) if prompt % PREFIX_TOKENS else ()  # differs from turn to turn
        yield at_s, prompt, answer, shared[:whole] + own + last
        if draw.random() < 1 / traffic.turns:
            return
        prompt += answer
        at_s += _lognormal(draw, traffic.pause_s)


def _lognormal(draw: Random, of: tuple[float, float]) -> int:
    median, sigma = of
    return max(round(draw.lognormvariate(math.log(median), sigma)), 1)
