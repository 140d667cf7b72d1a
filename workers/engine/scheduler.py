"""Which sequences run, and what each step computes. Pure, and free of torch: the simulated engine drives it too.

Order: interactive before batch, first come first served; a sequence that has to wait holds back those behind it, so
that nothing starves; batch makes room for interactive (`lanes`). A suspect (`alone`) waits until nothing runs, and then
nothing starts beside it.

A prompt is computed in pieces that begin at fixed positions. Whole ones are kept in the prefix cache, and found there
instead of being computed, when their turn comes: so of many prompts that begin alike and come at once, one computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec

from wire.messages import Sampling
from workers.engine.errors import SequenceRefused, Uncompilable
from workers.engine.generation import Generation, open_generations
from workers.engine.lanes import Group, Lanes, makes_room
from workers.engine.pace import Prompt
from workers.engine.prefix_cache import PrefixCache
from workers.engine.protocol import Emission, Key, Load, Prefixes, Sequence
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
    prefix_blocks: int = 0
    """pieces of prompts that the prefix cache keeps, of `chunk_tokens` tokens each"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A run of consecutive tokens to be computed for one slot.

    A step may hold several pieces of one prompt: each reads what the ones before it wrote in this step.
    """

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
    loads: tuple[int, ...] = ()
    """blocks of the prefix cache that hold the KV of the positions right before `start`: copied to the slot before
    anything of the step is computed"""
    save: int | None = None
    """block of the prefix cache that gets the KV of these tokens, once it is computed"""

    @property
    def rows(self) -> int:
        """Of how many positions, the last ones, logits are asked for."""
        if self.scored is not None:
            return len(self.ids)
        return self.guesses + 1 if self.draws else 0


class Scheduler:
    """The queue, the slots, and the plan of a step."""

    def __init__(self, limits: Limits, vocabulary: Vocabulary) -> None:
        self.limits = limits
        self._vocabulary = vocabulary
        self._waiting = Lanes()
        self._running: dict[Key, Group] = {}
        self._at: dict[int, tuple[Group, Generation]] = {}
        """slot → who has it"""
        self._free = list(range(limits.slots - 1, -1, -1))
        self._kv_reserved = 0
        self._settled: list[Emission] = []
        self._cache = PrefixCache(limits.prefix_blocks, limits.chunk_tokens)
        self._untold: dict[Key, int] = {}
        """prompt tokens found in the cache, of requests that have said nothing yet"""
        self._freed: set[int] = set()

    def add(self, sequence: Sequence) -> None:
        """Queue a request. One that can never run, and choices that were complete already, only have an ending."""
        try:
            check(sequence, self.limits, self._vocabulary.vocab_size)
            generations = open_generations(sequence, self._vocabulary)
        except (SequenceRefused, Uncompilable) as exc:
            # what a grammar is made of is the client's own and stays out of what operators read
            why = str(exc) if isinstance(exc, SequenceRefused) else "its grammar can't be compiled any more"
            self._settled.append(Emission(sequence.key, 0, 0, (), "", error=why))
            return
        chain = self._cache.chain(sequence.tenant, sequence.prompt, sequence.links)
        group = Group(sequence, [], chain, counted=bool(sequence.restored))
        for generation in generations:
            if (ending := generation.complete()) is not None:
                self._settled.append(ending)
            else:
                group.generations.append(generation)
        if group.generations:
            self._waiting.add(group)

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
        self._vacate(group, [generation.slot])
        if not group.generations:
            del self._running[generation.sequence.key]

    def freed(self) -> list[int]:
        """Slots whose choices have ended or made room; each is given once. Asked for between `plan` and the run of each
        step, none of them holds anything that is still wanted, whoever has the slot by then."""
        freed, self._freed = sorted(self._freed), set()
        return freed

    def busy(self) -> bool:
        return bool(self._running or self._waiting or self._settled)

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
                self._at[generation.slot] = group, generation
            self._kv_reserved += group.kv_tokens
            self._running[group.sequence.key] = group
            started.append(group)
        return started

    def running(self) -> Iterator[Generation]:
        """The choices that have a slot."""
        for group in self._running.values():
            yield from group.generations

    def running_keys(self) -> tuple[Key, ...]:
        """The requests that have slots."""
        return tuple(self._running)

    def prompts(self) -> list[Prompt]:
        """The prompts that have a slot and aren't computed to their end, the first to come first."""
        return [
            Prompt(key=key, tokens=self._left(group), batch=group.sequence.batch)
            for key, group in self._running.items()
            if group.waits_for_prompt
        ]

    def held_tokens(self) -> int:
        """Tokens in the slots, of all that run."""
        return sum(generation.computed for _, generation in self._at.values())

    def waiting(self) -> Iterator[Key]:
        """The requests that have no slot."""
        return (group.sequence.key for group in self._waiting)

    def plan(self, step_tokens: int | None = None, turns: Iterable[Key] | None = None) -> list[Work]:
        """What the next step computes: the next token of every choice that has all before it, whatever that costs;
        and within the budget what restored choices have to make up for, and the prompts' next pieces.

        `step_tokens`: of prompts, instead of the limit; 0 = none. `turns`: the order of the prompts, instead of that in
        which they came. Neither changes a piece's borders.
        """
        self.admit()
        budget = _Budget(self.limits.step_tokens if step_tokens is None else step_tokens)
        groups = list(self._running.values())
        going = [each for group in groups if not group.waits_for_prompt for each in group.generations]
        behind = [each for each in going if each.known - each.computed > 1]
        work = [_steps(each, 1) for each in going if each.known - each.computed == 1]
        work += _caught_up((each for each in behind if not each.sequence.batch), budget)
        for group in groups if turns is None else (self._running[key] for key in turns):
            work += self._pieces(group, budget)
        work += _caught_up((each for each in behind if each.sequence.batch), budget)
        return work

    def ran(self, work: Iterable[Work]) -> None:
        """The step is computed."""
        self._cache.settle()
        for item in work:
            end = item.start + len(item.ids)
            group, _ = self._at[item.slot]
            if not item.stepwise:
                group.prefilled = end
                self._count(group, item)
            for slot in (item.slot, *item.copies):
                self._at[slot][1].computed = end

    def fill(self, group: Group) -> None:
        """Take a prompt for computed, for an engine that computes nothing; the prefix cache learns it all the same."""
        while group.waits_for_prompt:
            self.ran(list(self._pieces(group, _Budget(len(group.sequence.prompt)))))

    def counted(self, emissions: list[Emission]) -> list[Emission]:
        """The same; the first one of each request says how much of its prompt was found in the cache, if any was."""
        if not self._untold:
            return emissions
        return [
            msgspec.structs.replace(emission, cached_tokens=cached)
            if (cached := self._untold.pop(emission.key, 0))
            else emission
            for emission in emissions
        ]

    def prefixes(self) -> Prefixes | None:
        """What of prefix chains came into the cache and left it since the last call; None without a cache."""
        if not self.limits.prefix_blocks:
            return None
        added, evicted = self._cache.changes()
        return Prefixes(tuple(added), tuple(evicted))

    def load(self) -> Load:
        waiting = list(self._waiting)
        return Load(
            running=self.limits.slots - len(self._free),
            waiting=len(waiting),
            waiting_tokens=sum(map(self._left, waiting)) + sum(prompt.tokens for prompt in self.prompts()),
            slots=self.limits.slots,
            kv_used_tokens=self._kv_reserved,
            kv_total_tokens=self.limits.kv_tokens,
        )

    def _next(self) -> Group | None:
        head = self._waiting.first()
        if head is None:
            return None
        if not self._fits(head):
            yielding = makes_room(head, self._running.values(), lambda gone: self._fits(head, gone))
            if not yielding:
                return None
            self._yield(yielding)
        self._waiting.take(head)
        return head

    def _fits(self, group: Group, gone: Iterable[Group] = ()) -> bool:
        """Whether there is room, once others are gone."""
        left, slots, kv_tokens = len(self._running), len(self._free), self.limits.kv_tokens - self._kv_reserved
        suspect = self._suspect()
        for other in gone:
            left, slots, kv_tokens = left - 1, slots + len(other.generations), kv_tokens + other.kv_tokens
            suspect = None if other is suspect else suspect
        if left and (group.sequence.alone or suspect is not None):
            return False
        return len(group.generations) <= slots and group.kv_tokens <= kv_tokens

    def _suspect(self) -> Group | None:
        """Which runs with nothing beside it."""
        return next((group for group in self._running.values() if group.sequence.alone), None)

    def _yield(self, groups: list[Group]) -> None:
        for group in groups:
            group.yields += 1
            del self._running[group.sequence.key]
            self._vacate(group, group.leave())
        self._waiting.put_back(groups)

    def _vacate(self, group: Group, slots: list[int]) -> None:
        for slot in slots:
            del self._at[slot]
        self._free += slots
        self._freed.update(slots)
        self._kv_reserved -= len(slots) * group.kv_of_choice

    def _forget(self, gone: Callable[[Key], bool]) -> None:
        self._settled = [emission for emission in self._settled if not gone(emission.key)]
        self._waiting.forget(gone)
        for key in [key for key in self._untold if gone(key)]:
            del self._untold[key]
        for key in [key for key in self._running if gone(key)]:
            for generation in list(self._running[key].generations):
                self.end(generation)

    # ------------------------------------------------------------ prompts

    def _pieces(self, group: Group, budget: _Budget) -> Iterator[Work]:
        """The next pieces of a prompt that the budget covers, after what the cache has of it."""
        size, prompt, at = self.limits.chunk_tokens, group.sequence.prompt, group.prefilled
        while at < len(prompt) and budget.open:
            index = at // size
            found = self._cache.find(group.chain, index, group.most_found(size))
            start = at + len(found.storages) * size
            end = min(len(prompt), start + size)
            if found.coming or not budget.covers(end - start):
                return
            budget.take(len(found.storages))  # copying a block takes about as long as computing a token
            self._cache.hold(group.chain, index, start // size)
            yield _piece(group, start, end, found.storages, self._cache.put(group.chain, start // size))
            at = end

    def _left(self, group: Group) -> int:
        """Prompt tokens that must still be computed, as far as can be told."""
        size = self.limits.chunk_tokens
        found = min(self._cache.likely(group.chain), group.most_found(size)) * size
        return len(group.sequence.prompt) - max(group.prefilled, found)

    def _count(self, group: Group, piece: Work) -> None:
        """Cached tokens are counted once: until the prompt is computed to its end for the first time (R2)."""
        if group.counted:
            return
        group.cached += len(piece.loads) * self.limits.chunk_tokens
        group.counted = not group.waits_for_prompt
        if group.counted and group.cached:
            self._untold[group.sequence.key] = group.cached


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

    @property
    def open(self) -> bool:
        """Whether it may cover anything more."""
        return self.left > 0

    def covers(self, tokens: int) -> bool:
        """Whether there is room for a whole piece of a prompt; if for any at all, then for the first one."""
        if not self._given or (tokens > self.left and not self._untouched):
            return False
        self.take(tokens)
        return True

    def take(self, tokens: int) -> None:
        self.left = max(0, self.left - tokens)
        self._untouched = False


def _piece(group: Group, start: int, end: int, loads: tuple[int, ...], save: int | None) -> Work:
    """A piece of a prompt. The last one serves every choice."""
    prompt = group.sequence.prompt
    first, *others = group.generations
    last = end == len(prompt)
    return Work(
        slot=first.slot,
        start=start,
        ids=prompt[start:end],
        stepwise=False,
        copies=tuple(other.slot for other in others) if last else (),
        draws=tuple(g for g in group.generations if not g.ids) if last else (),
        loads=loads,
        save=save,
        scored=first if first.scores_prompt else None,
    )


def _caught_up(generations: Iterable[Generation], budget: _Budget) -> Iterator[Work]:
    """As many as the budget has left of the tokens that choices have, and their KV has not."""
    for generation in generations:
        if count := min(generation.known - generation.computed, budget.left):
            budget.take(count)
            yield _steps(generation, count)


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
