"""What an engine says of itself, and what an ingress makes of it until the next time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from routing.simulator.engine import Engine
from routing.simulator.timing import BLOCK_TOKENS, Timing
from routing.simulator.trace import PREFIX_TOKENS, Arrival
from routing.slack import standins


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """An engine's state at `at_ms`, and what came and went in its cache since its last signal."""

    engine: int
    life: int
    """which of its lives: counts its starts"""
    at_ms: float
    in_flight: int
    waiting: int
    """of these, their prompts not complete"""
    backlog_tokens: int
    decoding: int
    kv_tokens: int
    used_blocks: int
    ttft_ms: float
    slacks_ms: tuple[int, ...]
    """how far ahead of their pace the decoding sequences are: `routing.slack.standins`"""
    timing: Timing
    """what the engine has measured its steps to take"""
    computed_tokens: int
    """of prompts, ever"""
    prefill_ms: float
    """spent on them"""
    generated_tokens: int
    """ever"""
    token_ms: float
    """the time between them, summed"""
    ended: int
    """requests, ever"""
    ttfts_ms: tuple[float, ...]
    """since its last signal"""
    added: tuple[int, ...]
    evicted: tuple[int, ...]


def take(engine: Engine, now_ms: float, life: int) -> Signal:
    """The engine's signal; what it says of its cache isn't said again."""
    engine.sync(now_ms)
    cache = engine.cache
    changed, cache.changed = cache.changed or {}, {}
    ttfts_ms, engine.ttfts_ms = engine.ttfts_ms, []
    return Signal(
        engine=engine.number,
        life=life,
        at_ms=now_ms,
        in_flight=engine.in_flight,
        waiting=len(engine.queue) + len(engine.partial),
        backlog_tokens=engine.backlog_tokens,
        decoding=len(engine.running),
        kv_tokens=engine.kv_tokens,
        used_blocks=engine.used_blocks,
        ttft_ms=engine.ttft_ms,
        slacks_ms=standins(engine.slacks_ms(now_ms)),
        timing=engine.timing,
        computed_tokens=engine.computed_tokens,
        prefill_ms=engine.prefill_ms,
        generated_tokens=engine.generated_tokens,
        token_ms=engine.token_ms,
        ended=engine.ended,
        ttfts_ms=tuple(ttfts_ms),
        added=tuple([piece for piece, came in changed.items() if came]),
        evicted=tuple([piece for piece, came in changed.items() if not came]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A request that an ingress just sent."""

    arrival: Arrival
    engine: int
    ingress: int
    attempt: int
    at_ms: float


class Index:
    """Which pieces of prompts an engine holds, by its signals."""

    def __init__(self) -> None:
        self._pieces: set[int] = set()
        self._life = 0

    def hear(self, signal: Signal) -> None:
        """What came and went; a new life begins with nothing."""
        if signal.life != self._life:
            self._life = signal.life
            self._pieces.clear()
        self._pieces.difference_update(signal.evicted)
        self._pieces.update(signal.added)

    def match(self, prefix: Sequence[int]) -> int:
        """Tokens of a prompt's beginning that the engine held."""
        pieces, count = self._pieces, 0
        for piece in prefix:
            if piece not in pieces:
                break
            count += 1
        return count * PREFIX_TOKENS


class Seen:
    """An engine as one ingress sees it: its last signal, and what was sent there since, as far as it knows."""

    def __init__(self, engine: int, index: Index) -> None:
        self.engine = engine
        self.heard_ms = 0.0
        self._index = index
        self._signal: Signal | None = None
        self._sent: deque[tuple[float, int, int]] = deque()
        self._tokens = self._blocks = 0

    def hear(self, signal: Signal) -> None:
        """A newer signal: what was sent before it is in it."""
        self._signal, self.heard_ms = signal, signal.at_ms
        while self._sent and self._sent[0][0] <= signal.at_ms:
            _, tokens, blocks = self._sent.popleft()
            self._tokens -= tokens
            self._blocks -= blocks

    def sent(self, sent: Sent) -> None:
        """A request was sent there."""
        if self._signal is not None and sent.at_ms <= self._signal.at_ms:
            return
        tokens = sent.arrival.prompt_tokens - min(self._index.match(sent.arrival.prefix), sent.arrival.prompt_tokens)
        blocks = tokens // BLOCK_TOKENS
        self._sent.append((sent.at_ms, tokens, blocks))
        self._tokens += tokens
        self._blocks += blocks

    @property
    def in_flight(self) -> int:
        return len(self._sent) + (self._signal.in_flight if self._signal else 0)

    @property
    def backlog_tokens(self) -> int:
        return self._tokens + (self._signal.backlog_tokens if self._signal else 0)

    @property
    def kv_tokens(self) -> int:
        return self._signal.kv_tokens if self._signal else 0

    @property
    def used_blocks(self) -> int:
        return self._blocks + (self._signal.used_blocks if self._signal else 0)

    @property
    def ttft_ms(self) -> float:
        return self._signal.ttft_ms if self._signal else 0.0

    def cached_tokens(self, prefix: Sequence[int]) -> int:
        return self._index.match(prefix)
