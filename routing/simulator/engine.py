"""One engine in virtual time: decodes all its sequences together, and prefills in chunks between.

A step takes a chunk of prompts (their prefill time) and a token for every decoding sequence (their decode time). A
sequence whose prompt is complete gets its first token in that step. Where no prompt waits, nothing changes until the
next ending: those steps are one span, whose time has a closed form. So a run costs by requests, not by tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from heapq import heapify, heappop, heappush

from routing.schedule import TARGETS
from routing.simulator.cache import Cache
from routing.simulator.sequence import UNKNOWN, Sequence
from routing.simulator.timing import BLOCK_TOKENS, CHUNK_TOKENS, Timing
from routing.simulator.trace import PREFIX_TOKENS, Arrival

SLOTS = 256
"""Sequences at once"""
LATELY = 0.1
"""What one time to first token counts in an engine's mean"""

Plan = tuple[int, Iterable[Sequence]]
"""so many tokens of prompts in this step, of these sequences in this order"""
Rule = Callable[["Engine"], Plan]
"""what to prefill in the step that begins now; 0 tokens: decode only"""


def first_come(engine: Engine) -> Plan:
    """The mocker's rule: the oldest first, as much as a step holds beside the decoding sequences."""
    return CHUNK_TOKENS - len(engine.running), engine.backlog()


class Engine:
    """Work comes by `add`; `advance` lets time pass. What has ended is appended to `done`."""

    def __init__(self, number: int, timing: Timing, rule: Rule = first_come) -> None:
        self.number = number
        self.timing = timing
        self.rule = rule
        self.cache = Cache(timing.kv_tokens // BLOCK_TOKENS)
        self.queue: deque[Sequence] = deque()
        """not begun"""
        self.partial: list[Sequence] = []
        """begun, their prompts incomplete"""
        self.running: list[Sequence] = []
        """decoding: a heap by their end"""
        self.steps = 0
        """decode steps so far"""
        self.kv_tokens = 0
        """logical, of the decoding sequences: what two of them share counts twice"""
        self.done: list[Sequence] = []
        """got their last token; somebody else clears this"""
        self.busy = False
        self.at_ms = 0.0
        """when the step began that is under way, or the last one ended"""
        self.ends_ms = 0.0
        """when it ends"""
        self.busy_ms = 0.0
        self.computed_tokens = self.generated_tokens = 0
        """of prompts, of answers"""
        self.token_ms = 0.0
        """the time between tokens, summed over them"""
        self.prefill_ms = 0.0
        """spent on prompts"""
        self.ended = 0
        self.ttfts_ms: list[float] = []
        """of those that got their first token here; somebody else clears this"""
        self._waited_ms: dict[int, float] = {}
        self._queue_tokens = 0
        self._prefilled: list[Sequence] = []
        self._span = 0
        self._own = 0.0
        self._own_blocks = 0

    @property
    def in_flight(self) -> int:
        return len(self.queue) + len(self.partial) + len(self.running)

    @property
    def backlog_tokens(self) -> int:
        """Of prompts, still to be computed: for those in the queue as it seemed when they came."""
        return self._queue_tokens + sum(sequence.left_tokens for sequence in self.partial)

    @property
    def used_blocks(self) -> int:
        """Of the cache: in use, or about to be by what is in the queue."""
        return self.cache.blocks - self.cache.room + self._queue_tokens // BLOCK_TOKENS

    @property
    def ttft_ms(self) -> float:
        """What those waited for their first token lately who found about as many in flight as there are now."""
        waited_ms, now = self._waited_ms, self.in_flight
        return waited_ms[min(waited_ms, key=lambda beside: abs(beside - now))] if waited_ms else 0.0

    def slacks_ms(self, now_ms: float, tbt_ms: float = TARGETS.tbt_ms) -> list[float]:
        """How far ahead of their pace its decoding sequences are, as of the last step that was counted."""
        ahead_ms = tbt_ms * self.steps - now_ms
        return [ahead_ms - tbt_ms * one.since + one.first_token_ms for one in self.running]

    def cached_tokens(self, prefix: Many[int]) -> int:
        """Tokens of a prompt's beginning that the cache holds."""
        return self.cache.match(prefix)

    def backlog(self) -> list[Sequence]:
        """What waits for prefill, the oldest first."""
        return [*self.partial, *self.queue]

    def add(self, arrival: Arrival, now_ms: float) -> Sequence:
        """A request comes to the engine, which is advanced to now. ValueError for one that could never run."""
        if arrival.prompt_tokens + arrival.output_tokens + 2 * BLOCK_TOKENS > self.timing.kv_tokens:
            raise ValueError(f"{arrival.prompt_tokens} tokens and {arrival.output_tokens} don't fit into the cache")
        sequence = Sequence(arrival, now_ms)
        sequence.beside = self.in_flight
        sequence.expected_tokens = arrival.prompt_tokens - self.cache.match(arrival.prefix)
        self.queue.append(sequence)
        self._queue_tokens += sequence.expected_tokens
        if not self.busy:
            self.ends_ms = max(self.ends_ms, now_ms)
        elif self._span > 1:
            self.sync(now_ms)
            self._decode(1)
        return sequence

    def advance(self, now_ms: float) -> None:
        """Let time pass: what ends by now has ended. A step that could begin just now hasn't begun yet."""
        while True:
            if self.busy:
                if self.ends_ms > now_ms:
                    return
                self._end()
            if self.ends_ms >= now_ms or not (self.running or self.queue or self.partial):
                return
            self._begin()

    def sync(self, now_ms: float) -> None:
        """Count those steps of a span that have ended by now, so that what is read here is up to date."""
        if self.busy and self._span > 1:
            ended = self.timing.steps_within(self.kv_tokens, len(self.running), self._span, now_ms - self.at_ms)
            if ended:
                spent_ms = self.timing.span_ms(self.kv_tokens, len(self.running), ended)
                self._count(ended, spent_ms)
                self._span -= ended
                self.busy_ms += spent_ms
                self.at_ms += spent_ms

    def change(self, times: float, now_ms: float) -> None:
        """From the next step on it is so many times as fast."""
        self.sync(now_ms)
        if self.busy and self._span > 1:
            self._decode(1)
        self.timing = self.timing.faster(times)

    def halt(self) -> list[Sequence]:
        """The engine dies: what it had is returned, its cache is empty."""
        lost = [*self.partial, *self.queue, *self.running]
        self.queue.clear()
        self.partial, self.running, self._prefilled = [], [], []
        self.cache = Cache(self.cache.blocks)
        self.done, self.busy = [], False
        self._span = self.kv_tokens = self._queue_tokens = self._own_blocks = 0
        self._own = 0.0
        return lost

    def _begin(self) -> None:
        self.busy, self.at_ms = True, self.ends_ms
        self._prefilled = []
        tokens = self._prefill() if self.queue or self.partial else 0
        waits = self.partial or (self.queue and self.rule is not first_come)
        steps = self._room_for(1 if tokens or waits else self.running[0].finish_at - self.steps) if self.running else 0
        if not tokens and not steps:  # what decoded had to give way to what has begun
            tokens = self._prefill()
        if not tokens:
            self._decode(steps)
            return
        self.computed_tokens += tokens
        self._span = 1 if steps else 0
        decode_ms = self.timing.decode_ms(self.kv_tokens) if steps else 0.0
        prefill_ms = self.timing.prefill_ms(tokens)
        self.prefill_ms += prefill_ms
        self.ends_ms = self.at_ms + prefill_ms + decode_ms

    def _decode(self, steps: int) -> None:
        """What is under way since `at_ms` are `steps` decode steps."""
        self._span = steps
        self.ends_ms = self.at_ms + self.timing.span_ms(self.kv_tokens, len(self.running), steps)

    def _prefill(self) -> int:
        """Compute what the rule says; how many tokens that is. With nothing to decode, a step is never empty.

        Where one can't be begun for want of room, none that comes after it is begun either: it would never be its turn.
        """
        budget, order = self.rule(self)
        if budget <= 0 and not self.running:
            budget = CHUNK_TOKENS
        left, admits = budget, True
        for sequence in order:
            if left <= 0:
                break
            if sequence.started_ms == UNKNOWN:
                admits = admits and self._admit(sequence)
                if not admits:
                    continue
            tokens = min(left, sequence.left_tokens)
            left -= tokens
            self._make_room(tokens // BLOCK_TOKENS + 2, keep=0)
            self._compute(sequence, tokens)
        return budget - left

    def _admit(self, sequence: Sequence) -> bool:
        """Look a prompt up in the cache and begin it, if there is a slot, and room for all of it.

        At least its last token is computed, whatever is cached.
        """
        if len(self.partial) + len(self.running) >= SLOTS:
            return False
        arrival, total = sequence.arrival, sequence.left_tokens
        most = min(total - 1, arrival.prompt_tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        cached = min(self.cache.match(arrival.prefix), most)
        pieces = -(-cached // PREFIX_TOKENS)
        self.cache.pin(arrival.prefix[:pieces])
        promised = sum(max(other.arrival.prompt_tokens - other.computed_tokens, 0) for other in self.partial)
        promised += total - cached
        if promised / BLOCK_TOKENS + 1 + len(self.partial) > self.cache.room:
            self.cache.unpin(arrival.prefix[:pieces])
            return False
        if self.queue[0] is sequence:
            self.queue.popleft()
        else:
            self.queue.remove(sequence)
        self._queue_tokens -= sequence.expected_tokens
        self.partial.append(sequence)
        self._owns(1 + sequence.generated_tokens / BLOCK_TOKENS)
        sequence.started_ms = self.at_ms
        sequence.pieces, sequence.computed_tokens = pieces, cached
        if not sequence.generated_tokens:
            sequence.cached_tokens = cached
        return True

    def _compute(self, sequence: Sequence, tokens: int) -> None:
        """The next tokens of a prompt; the blocks that they fill can be found from now on."""
        sequence.computed_tokens += tokens
        blocks = min(sequence.computed_tokens, sequence.arrival.prompt_tokens) // BLOCK_TOKENS
        sequence.pieces = self.cache.fill(sequence.arrival.prefix, sequence.pieces, blocks)
        if not sequence.left_tokens:
            self._prefilled.append(sequence)

    def _end(self) -> None:
        self.busy = False
        spent_ms = self.ends_ms - self.at_ms
        self.busy_ms += spent_ms
        self.at_ms = self.ends_ms
        if self._span:
            self._count(self._span, spent_ms)
        for sequence in self._prefilled:
            self._first_token(sequence)
        while self.running and self.running[0].finish_at <= self.steps:
            self._finish(heappop(self.running))

    def _count(self, steps: int, spent_ms: float) -> None:
        """So many decode steps have ended, in this time."""
        self.token_ms += spent_ms * len(self.running)
        tokens = steps * len(self.running)
        self.steps += steps
        self.kv_tokens += tokens
        self.generated_tokens += tokens
        self._owns(tokens / BLOCK_TOKENS)

    def _first_token(self, sequence: Sequence) -> None:
        self.partial.remove(sequence)
        if sequence.first_token_ms == UNKNOWN:
            sequence.first_token_ms = self.ends_ms
            waited_ms = self.ends_ms - sequence.queued_ms
            self.ttfts_ms.append(waited_ms)
            before_ms = self._waited_ms.setdefault(sequence.beside, waited_ms)
            self._waited_ms[sequence.beside] = before_ms + LATELY * (waited_ms - before_ms)
        generated = sequence.generated_tokens + 1
        sequence.since = self.steps - generated
        sequence.finish_at = sequence.since + sequence.arrival.output_tokens
        self.kv_tokens += sequence.arrival.prompt_tokens + generated
        self._owns(1 / BLOCK_TOKENS)
        heappush(self.running, sequence)

    def _finish(self, sequence: Sequence) -> None:
        arrival = sequence.arrival
        sequence.finished_ms = self.ends_ms
        self._leave(sequence, arrival.output_tokens)
        spent = (arrival.prompt_tokens % BLOCK_TOKENS + arrival.output_tokens) // BLOCK_TOKENS
        self.cache.take(spent)
        self.cache.leave(spent)
        self.ended += 1
        self.done.append(sequence)

    def _leave(self, sequence: Sequence, generated: int) -> None:
        """A decoding sequence gives up its place and its blocks."""
        self.kv_tokens -= sequence.arrival.prompt_tokens + generated
        self._owns(-1 - generated / BLOCK_TOKENS)
        self.cache.unpin(sequence.arrival.prefix[: sequence.pieces])

    def _owns(self, blocks: float) -> None:
        """The sequences' own blocks, which no other prompt can use: what is generated, and each one's last block."""
        self._own += blocks
        more = math.ceil(self._own - 1e-6) - self._own_blocks
        if more:
            self._own_blocks += more
            self.cache.take(more)

    def _room_for(self, steps: int) -> int:
        """How many of `steps` decode steps there is room for: at least one, unless all had to give way."""
        self._make_room(len(self.running) // BLOCK_TOKENS + 2, keep=0 if self.partial else 1)
        if not self.running:
            return 0
        return max(min(steps, (self.cache.room - 1) * BLOCK_TOKENS // len(self.running)), 1)

    def _make_room(self, blocks: int, keep: int) -> None:
        """While there isn't room for so many blocks, the sequence that was begun last loses its place; `keep` stay."""
        while self.cache.room < blocks and len(self.running) > keep:
            self._preempt(max(self.running, key=lambda sequence: sequence.started_ms))

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        heapify(self.running)
        sequence.generated_tokens = self.steps - sequence.since
        self._leave(sequence, sequence.generated_tokens)
        sequence.started_ms, sequence.computed_tokens, sequence.pieces = UNKNOWN, 0, 0
        sequence.expected_tokens = sequence.left_tokens
        self._queue_tokens += sequence.expected_tokens
        self.queue.appendleft(sequence)
