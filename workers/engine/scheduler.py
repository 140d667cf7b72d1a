"""Which sequences run, and what each step computes. Pure, and free of torch: the simulated engine drives it too.

Order: interactive before batch, first come first served; a sequence that has to wait holds back those behind it, so
that nothing starves. A suspect (`alone`) waits until nothing runs, and then nothing starts beside it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from wire.messages import Sampling
from workers.engine.errors import SequenceRefused
from workers.engine.generation import Generation, open_generations
from workers.engine.pace import Prompt
from workers.engine.protocol import Emission, Key, Load, Sequence
from workers.engine.vocabulary import Vocabulary, names_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine has room for."""

    slots: int
    """choices that run at once"""
    context_tokens: int
    """of one choice, its prompt included"""
    kv_tokens: int
    """of all choices together"""
    chunk_tokens: int
    """prompts are computed in pieces that begin at multiples of this, whatever else runs"""
    step_tokens: int
    """prompt and restored tokens that one step may add to the decoding; at least one piece is computed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A run of consecutive tokens to be computed for one slot."""

    slot: int
    start: int
    """position of ids[0]"""
    ids: tuple[int, ...]
    stepwise: bool
    """compute as if token by token (a choice), not as one piece (a prompt): the numbers may differ in the last bit"""
    copies: tuple[int, ...] = ()
    """slots that get the KV of positions 0 to start + len(ids) too: the other choices of the same prompt"""
    draws: tuple[Generation, ...] = ()
    """choices whose next token is drawn from the last position that isn't a guess"""
    guesses: int = 0
    """how many of the last ids are guessed: what follows each is drawn too, if it turns out to be right"""
    scored: Generation | None = None
    """the choice that is to know how likely the model found these tokens of the prompt"""

    @property
    def rows(self) -> int:
        """Of how many positions, the last ones, logits are asked for."""
        if self.scored is not None:
            return len(self.ids)
        return self.guesses + 1 if self.draws else 0


@dataclass(slots=True)
class Group:
    """A request that waits or runs, with its open choices."""

    sequence: Sequence
    generations: list[Generation]
    prefilled: int = 0
    """prompt tokens whose KV is there"""
    reserved: int = 0
    """KV tokens that it holds a claim to, once it runs"""


class Scheduler:
    """The queue, the slots, and the plan of a step."""

    def __init__(self, limits: Limits, vocabulary: Vocabulary) -> None:
        self.limits = limits
        self._vocabulary = vocabulary
        self._interactive: deque[Group] = deque()
        self._batch: deque[Group] = deque()
        self._running: dict[Key, Group] = {}
        self._free = list(range(limits.slots - 1, -1, -1))
        self._kv_reserved = 0
        self._settled: list[Emission] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a request. One that can never run, and choices that were complete already, only have an ending."""
        try:
            check(sequence, self.limits, self._vocabulary.vocab_size)
        except SequenceRefused as exc:
            self._settled.append(Emission(sequence.key, 0, 0, (), "", error=str(exc)))
            return
        group = Group(sequence, [])
        for generation in open_generations(sequence, self._vocabulary):
            if (ending := generation.complete()) is not None:
                self._settled.append(ending)
            else:
                group.generations.append(generation)
        if group.generations:
            (self._batch if sequence.batch else self._interactive).append(group)

    def settled(self) -> list[Emission]:
        """Endings of what needs no step; each is given once."""
        settled, self._settled = self._settled, []
        return settled

    def cancel(self, key: Key) -> None:
        """Forget a request; its slots are free at once."""
        self._forget(lambda other: other == key)

    def drop(self, shard: int, epoch: int) -> None:
        """Forget every request of an epoch."""
        self._forget(lambda key: key.shard == shard and key.epoch == epoch)

    def end(self, generation: Generation) -> None:
        """A choice has ended: its slot is free."""
        group = self._running[generation.sequence.key]
        group.generations.remove(generation)
        self._free.append(generation.slot)
        if not group.generations:
            self._kv_reserved -= group.reserved
            del self._running[generation.sequence.key]

    def busy(self) -> bool:
        return bool(self._running or self._interactive or self._batch or self._settled)

    def runs(self, generation: Generation) -> bool:
        """Whether a choice still has its slot."""
        group = self._running.get(generation.sequence.key)
        return group is not None and generation in group.generations

    def admit(self) -> list[Group]:
        """Start what there is room for; those that start now."""
        started = []
        while (group := self._next()) is not None:
            for generation in group.generations:
                generation.slot = self._free.pop()
            group.reserved = _kv_tokens(group)
            self._kv_reserved += group.reserved
            self._running[group.sequence.key] = group
            started.append(group)
        return started

    def running(self) -> Iterator[Generation]:
        """The choices that have a slot."""
        for group in self._running.values():
            yield from group.generations

    def prompts(self) -> list[Prompt]:
        """The prompts that have a slot and aren't computed to their end, the first to come first."""
        return [
            Prompt(key=key, tokens=len(group.sequence.prompt) - group.prefilled, batch=group.sequence.batch)
            for key, group in self._running.items()
            if group.prefilled < len(group.sequence.prompt)
        ]

    def held_tokens(self) -> int:
        """Tokens in the cache, of all that run."""
        return sum(generation.computed for generation in self.running())

    def waiting(self) -> Iterator[Key]:
        """The requests that have no slot."""
        return (group.sequence.key for group in (*self._interactive, *self._batch))

    def plan(self, step_tokens: int | None = None, turns: Iterable[Key] | None = None) -> list[Work]:
        """What the next step computes: the next token of every choice, and the prompts' next pieces.

        `step_tokens`: of prompts, instead of the limit; 0 = none. `turns`: the order of the prompts, instead of that in
        which they came. Neither changes a piece's borders.
        """
        self.admit()
        budget = _Budget(self.limits.step_tokens if step_tokens is None else step_tokens)
        done = [group for group in self._running.values() if group.prefilled == len(group.sequence.prompt)]
        work = [item for group in done for item in _continued(group, budget)]
        if turns is None:
            turns = [prompt.key for prompt in self.prompts()]
        pieces = (_next_piece(self._running[key], self.limits.chunk_tokens) for key in turns)
        return [*work, *filter(budget.covers, pieces)]

    def ran(self, work: list[Work]) -> None:
        """The step is computed."""
        by_slot = {generation.slot: generation for generation in self.running()}
        for item in work:
            end = item.start + len(item.ids)
            if not item.stepwise:
                group = self._running[by_slot[item.slot].sequence.key]
                group.prefilled = end
            for slot in (item.slot, *item.copies):
                by_slot[slot].computed = end

    def load(self) -> Load:
        waiting = [*self._interactive, *self._batch]
        return Load(
            running=self.limits.slots - len(self._free),
            waiting=len(waiting),
            waiting_tokens=sum(len(group.sequence.prompt) for group in waiting)
            + sum(prompt.tokens for prompt in self.prompts()),
            slots=self.limits.slots,
            kv_used_tokens=self._kv_reserved,
            kv_total_tokens=self.limits.kv_tokens,
        )

    def _next(self) -> Group | None:
        queue = self._interactive or self._batch
        if not queue or not self._fits(queue[0]):
            return None
        return queue.popleft()

    def _fits(self, group: Group) -> bool:
        if self._running and (group.sequence.alone or self._suspect_runs()):
            return False
        return (
            len(group.generations) <= len(self._free) and self._kv_reserved + _kv_tokens(group) <= self.limits.kv_tokens
        )

    def _suspect_runs(self) -> bool:
        return any(group.sequence.alone for group in self._running.values())

    def _forget(self, gone: Callable[[Key], bool]) -> None:
        self._settled = [emission for emission in self._settled if not gone(emission.key)]
        for queue in (self._interactive, self._batch):
            kept = [group for group in queue if not gone(group.sequence.key)]
            queue.clear()
            queue.extend(kept)
        for key in [key for key in self._running if gone(key)]:
            for generation in list(self._running[key].generations):
                self.end(generation)


def _kv_tokens(group: Group) -> int:
    """What a request may need in all."""
    return len(group.generations) * (len(group.sequence.prompt) + group.sequence.max_tokens)


def check(sequence: Sequence, limits: Limits, vocab_size: int) -> None:
    """SequenceRefused, with a sentence, for what no amount of waiting makes possible."""
    tokens = len(sequence.prompt) + sequence.max_tokens
    if not sequence.prompt:
        raise SequenceRefused("the prompt has no tokens")
    if not all(0 <= token < vocab_size for token in sequence.prompt):
        raise SequenceRefused(f"the prompt holds a token id outside 0 to {vocab_size - 1}")
    if sequence.max_tokens < 1 or sequence.n < 1:
        raise SequenceRefused("max_tokens and n must be at least 1")
    if tokens > limits.context_tokens:
        raise SequenceRefused(
            f"prompt and max_tokens are {tokens} tokens together; the context holds {limits.context_tokens}"
        )
    if sequence.n > limits.slots or sequence.n * tokens > limits.kv_tokens:
        raise SequenceRefused(f"{sequence.n} choices are more than this engine can run at once; ask for fewer")
    if sequence.restored and len(sequence.restored) != sequence.n:
        raise SequenceRefused("restored must name every choice, or none")
    _check_sampling(sequence.sampling, vocab_size)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    if not all(names_token(token, vocab_size) for token in sampling.logit_bias):
        raise SequenceRefused(f"logit_bias names a token outside 0 to {vocab_size - 1}")
    numbers = (
        *(sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty),
        *(sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values()),
    )
    if not all(map(math.isfinite, numbers)) or sampling.repetition_penalty <= 0:
        raise SequenceRefused("a sampling parameter is not a usable number")


class _Budget:
    """The prompt and restored tokens that a step may still add to the decoding."""

    def __init__(self, tokens: int) -> None:
        self.left = self._given = tokens
        self._untouched = True

    def covers(self, piece: Work) -> bool:
        """Whether there is room for a whole piece of a prompt; if for any at all, then for the first one."""
        if not self._given or (len(piece.ids) > self.left and not self._untouched):
            return False
        self.take(len(piece.ids))
        return True

    def take(self, tokens: int) -> None:
        self.left = max(0, self.left - tokens)
        self._untouched = False


def _next_piece(group: Group, chunk_tokens: int) -> Work:
    """The next piece of a prompt. The last one serves every choice."""
    prompt, start = group.sequence.prompt, group.prefilled
    end = min(len(prompt), (start // chunk_tokens + 1) * chunk_tokens)
    first, *others = group.generations
    last = end == len(prompt)
    return Work(
        slot=first.slot,
        start=start,
        ids=prompt[start:end],
        stepwise=False,
        copies=tuple(other.slot for other in others) if last else (),
        draws=tuple(g for g in group.generations if not g.ids) if last else (),
        scored=first if first.scores_prompt else None,
    )


def _continued(group: Group, budget: _Budget) -> Iterator[Work]:
    """The next token of each choice; of a restored one, as many of its tokens as the budget has left."""
    for generation in group.generations:
        pending = generation.known - generation.computed
        if pending > 1:
            pending = min(pending, budget.left)
            budget.take(pending)
        if pending:
            yield _steps(generation, pending)


def _steps(generation: Generation, count: int) -> Work:
    begin = generation.computed - len(generation.sequence.prompt)
    last = generation.computed + count == generation.known
    return Work(
        slot=generation.slot,
        start=generation.computed,
        ids=tuple(generation.ids[begin : begin + count]),
        stepwise=True,
        draws=(generation,) if last else (),
    )
