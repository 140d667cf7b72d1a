"""Policies that put cache and load into one figure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from routing.simulator.peers.load import least
from routing.simulator.policy import View
from routing.simulator.timing import BLOCK_TOKENS
from routing.simulator.trace import Arrival


def prefill_tokens(arrival: Arrival, engine: View) -> int:
    """What the engine would have to prefill with this prompt: its backlog and what it doesn't hold of the prompt."""
    return max(engine.backlog_tokens + arrival.prompt_tokens - engine.cached_tokens(arrival.prefix), 0)


def new_blocks(arrival: Arrival, engine: View) -> int:
    """Blocks that the prompt would add."""
    return -(-(arrival.prompt_tokens - engine.cached_tokens(arrival.prefix)) // BLOCK_TOKENS)


class Dynamo:
    """The cost of the key/value router of NVIDIA Dynamo: scale · prefill blocks + active blocks + new blocks.

    Prefill blocks are of the backlog and of what the prompt adds to it; `scale` is its `prefill_load_scale`.
    """

    def __init__(self, scale: float = 1.0, seed: int = 0) -> None:
        self._scale = scale
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        def cost(engine: View) -> float:
            prefill = prefill_tokens(arrival, engine) / BLOCK_TOKENS
            return self._scale * prefill + engine.used_blocks + new_blocks(arrival, engine)

        return least(engines, range(len(engines)), self._draw, cost)


class LMetric:
    """LMetric (Zhang and others, "Multiplication may be all you need for LLM request scheduling", arXiv 2603.15202).

    The product of the tokens to prefill with this prompt, and the blocks in use + 1: nothing to weigh.
    """

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, arrival: Arrival, now_ms: float, engines: Sequence[View]) -> int:
        def cost(engine: View) -> float:
            return prefill_tokens(arrival, engine) * (engine.used_blocks + 1)

        return least(engines, range(len(engines)), self._draw, cost)
