"""Policies that follow the cache, until load says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean, pstdev

from routing.simulator.peers.load import in_flight, least
from routing.simulator.policy import View
from routing.simulator.timing import COLD
from routing.simulator.trace import Arrival


def matches(arrival: Arrival, engines: Sequence[View]) -> list[float]:
    """The share of the prompt that each engine's cache holds."""
    return [engine.cached_tokens(arrival.prefix) / arrival.prompt_tokens for engine in engines]


class CacheAware:
    """`cache_aware` of the SGLang and vLLM routers, with their defaults.

    If max − min > 64 and max > 1.5 · min requests are in flight, the fewest; else if the best match is over 0.3, that
    engine; else the fewest in flight.
    """

    APART, TIMES, MATCH = 64, 1.5, 0.3

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        loads = [engine.in_flight for engine in engines]
        if max(loads) - min(loads) <= self.APART or max(loads) <= self.TIMES * min(loads):
            match = matches(arrival, engines)
            if max(match) > self.MATCH:
                return match.index(max(match))
        return least(engines, range(len(engines)), self._draw, in_flight)


class AIBrix:
    """`prefix-cache` of the AIBrix gateway, with its defaults.

    If max − min > 8 requests are in flight, the fewest; else the best match among engines with no more than mean + 1
    standard deviation in flight, the less loaded of equals; where no such engine has a match, the fewest in flight.
    """

    APART, DEVIATIONS = 8, 1.0

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        loads = [engine.in_flight for engine in engines]
        if max(loads) - min(loads) <= self.APART:
            limit = fmean(loads) + self.DEVIATIONS * pstdev(loads)
            match = matches(arrival, engines)
            held = [index for index in range(len(engines)) if match[index] > 0 and loads[index] <= limit]
            if held:
                return min(held, key=lambda index: (-match[index], loads[index]))
        return least(engines, range(len(engines)), self._draw, in_flight)


class Sticky:
    """llm-d's prefix-cache-affinity-filter and token-load-scorer, with their defaults.

    Engines that hold at least 0.8 of the prompt are kept, unless the best of them would give the first token over 5 s
    later than the best of all; of what is left, the fewest uncached tokens in flight, this prompt's included.
    """

    MATCH, PENALTY_MS = 0.8, 5_000.0

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        match = matches(arrival, engines)
        tokens = [
            engine.backlog_tokens + arrival.prompt_tokens * (1 - share)
            for engine, share in zip(engines, match, strict=True)
        ]
        among = [index for index, share in enumerate(match) if share >= self.MATCH]
        if not among or self._ttft_ms([tokens[index] for index in among]) - self._ttft_ms(tokens) > self.PENALTY_MS:
            among = list(range(len(engines)))
        lowest = min(tokens[index] for index in among)
        return self._draw.choice([index for index in among if tokens[index] == lowest])

    @staticmethod
    def _ttft_ms(tokens: Sequence[float]) -> float:
        return COLD.chunked_ms(int(min(tokens)))
