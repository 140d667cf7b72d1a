"""An engine without a model: seeded words at a set pace. For tests, benchmarks and the control plane.

Time: a request's first token comes `ttft_ms` after it got its slot; from then on all choices advance together, one
token each, at multiples of `tbt_ms`, as in an engine whose steps take that long.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import msgspec

from wire.messages import Logprob, StepCost
from workers.engine.errors import SamplingFailed
from workers.engine.generation import Generation
from workers.engine.lanes import Group
from workers.engine.protocol import Emission, Key, Load, Prefixes, Sequence
from workers.engine.scheduler import Limits, Scheduler
from workers.engine.simulated_vocabulary import END, FIRST_WORD, HALVES, WORDS, SimulatedVocabulary

Sleep = Callable[[float], None]
"""waits so many seconds, or less when there is something else to do"""
_EMOJI_ONE_IN = 16
_CLOSERS = (END, *b'"}]')
_CLOSES_ONE_IN = 4
_SHORTEST_TOKENS = 8
_LONGEST_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The latency model."""

    ttft_ms: float
    """from slot to first token"""
    tbt_ms: float
    """between tokens"""


class SimulatedEngine:
    """Implements `workers.engine.protocol.Engine`."""

    def __init__(
        self,
        limits: Limits,
        pace: Pace,
        *,
        sleep: Sleep = time.sleep,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = Scheduler(limits, SimulatedVocabulary())
        self._pace = pace
        self._sleep = sleep
        self._now_s = now_s
        self._due_s: dict[Generation, float] = {}

    @property
    def fingerprint(self) -> str:
        return "sim-1"

    def add(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)

    def cancel(self, key: Key) -> None:
        self._scheduler.cancel(key)
        self._forget()

    def drop(self, shard: int, epoch: int) -> None:
        self._scheduler.drop(shard, epoch)
        self._forget()

    def admit(self) -> Seq[Key]:
        return self._scheduler.running_keys() if self._start() else ()

    def step(self) -> Seq[Emission]:
        """Wait for what is due next, and emit it. Empty when `sleep` returned early."""
        self._start()
        settled = self._scheduler.settled()
        if settled or not self._due_s:
            return settled
        wait_s = min(self._due_s.values()) - self._now_s()
        if wait_s > 0:
            self._sleep(wait_s)
        now_s = self._now_s()
        due = [generation for generation, due_s in self._due_s.items() if due_s <= now_s]
        alive = (generation for generation in due if self._scheduler.runs(generation))
        return self._scheduler.counted([self._advance(generation) for generation in alive])

    def busy(self) -> bool:
        return self._scheduler.busy()

    def load(self) -> Load:
        tbt_ms = self._pace.tbt_ms
        rate = None if tbt_ms <= 0 else self._scheduler.limits.slots * 1000 / tbt_ms
        step = StepCost(prefill_fixed_ms=self._pace.ttft_ms, prefill_token_ms=0.0, decode_ms=tbt_ms)
        return msgspec.structs.replace(self._scheduler.load(), decode_tokens_per_s=rate, step=step)

    def prefixes(self) -> Prefixes | None:
        return self._scheduler.prefixes()

    def _start(self) -> list[Group]:
        started = self._scheduler.admit()
        if started:
            self._forget()  # those that made room
        for group in started:
            self._scheduler.fill(group)
            for generation in group.generations:
                self._due_s[generation] = self._now_s() + self._pace.ttft_ms / 1000
        return started

    def _advance(self, generation: Generation) -> Emission:
        try:
            token, logprob = draw(generation)
        except SamplingFailed as exc:
            self._scheduler.cancel(generation.sequence.key)
            self._forget()
            return generation.fail(str(exc))
        if generation.scores_prompt:
            generation.score(0, [Logprob(-0.1)] * (len(generation.sequence.prompt) - 1))
        emission = generation.take(token, logprob)
        if emission.end is None:
            self._due_s[generation] = self._next_tick_s()
        else:
            del self._due_s[generation]
            self._scheduler.end(generation)
        return emission

    def _next_tick_s(self) -> float:
        """Shared by all choices, so that a step serves them together."""
        now_s, tbt_s = self._now_s(), self._pace.tbt_ms / 1000
        return now_s if tbt_s <= 0 else (now_s // tbt_s + 1) * tbt_s

    def _forget(self) -> None:
        kept = set(self._scheduler.running())
        self._due_s = {generation: due_s for generation, due_s in self._due_s.items() if generation in kept}


def draw(generation: Generation) -> tuple[int, Logprob | None]:
    """The next token of a choice: a pure function of seed, choice and position; at temperature 0 of position alone.

    Where a grammar forbids it, another one that soon leads to an end. SamplingFailed.
    """
    sequence, position = generation.sequence, len(generation.ids)
    greedy = sequence.sampling.temperature == 0
    seed, choice = (0, 0) if greedy else (sequence.sampling.seed, generation.choice)
    token = token_at(seed, choice, position)
    if not generation.bars_eos and position >= length_of(seed, choice):
        token = END
    if generation.matcher is not None and (allowed := generation.matcher.allowed()) is not None:
        token = bound(token, allowed, _dice(seed, choice, position))
    if sequence.logprobs is None:
        return token, None
    likely = tuple((token + rank if rank else token, -0.1 - rank) for rank in range(sequence.logprobs))
    return token, Logprob(-0.1, tuple((other % END, value) for other, value in likely))


def token_at(seed: int, choice: int, position: int) -> int:
    """Words, and now and then an emoji that takes two tokens: it starts at even positions."""
    pair = _dice(seed, choice, position // 2)
    if pair % _EMOJI_ONE_IN == 0:
        return HALVES[position % 2]
    return FIRST_WORD + (pair >> (8 + 16 * (position % 2))) % len(WORDS)


def bound(token: int, allowed: bytes, dice: int) -> int:
    """The token, if it is allowed and it is not time to come to an end; otherwise what closes something, or any."""
    ids = [other for other in range(END + 1) if allowed[other // 8] >> other % 8 & 1]
    if token in ids and dice % _CLOSES_ONE_IN:
        return token
    return next((closer for closer in _CLOSERS if closer in ids), ids[dice % len(ids)])


def length_of(seed: int, choice: int) -> int:
    """Tokens after which a choice ends by itself."""
    return _SHORTEST_TOKENS + _dice(seed, choice, -1) % (_LONGEST_TOKENS - _SHORTEST_TOKENS)


def _dice(seed: int, choice: int, counter: int) -> int:
    drawn = hashlib.blake2b(b"%d,%d,%d" % (seed, choice, counter), digest_size=8).digest()
    return int.from_bytes(drawn, "little")
