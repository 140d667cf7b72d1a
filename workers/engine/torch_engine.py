"""The engine with a real model: schedule → run → sample → emit."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from workers.engine.drawing import Drawn
from workers.engine.errors import ModelUnusable, SamplingFailed
from workers.engine.generation import Generation, joined
from workers.engine.pace import Pace
from workers.engine.protocol import Emission, Key, Load, Prefixes, Sequence
from workers.engine.rates import Rate
from workers.engine.runner import Logits, load_runner
from workers.engine.sampler import load_sampler
from workers.engine.scheduler import Limits, Scheduler, Work
from workers.engine.speculation import Speculation
from workers.engine.vocabulary import Vocabulary


class Runner(Protocol):
    """The model itself, whatever it runs on."""

    @property
    def fingerprint(self) -> str:
        """The numerics class."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def keep_blocks(self, blocks: int, tokens: int) -> None:
        """Make room for so many blocks of so many tokens, which `Work.loads` and `Work.save` name."""
        ...

    def run(self, work: Seq[Work]) -> Logits:
        """Compute a step. Logits of the last `rows` positions of each item, in order: [all their rows, vocab]."""
        ...


class TorchEngine:
    """Implements `workers.engine.protocol.Engine`."""

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        limits: Limits,
        *,
        now_s: Callable[[], float] = time.perf_counter,
        speculation: Speculation | None = None,
    ) -> None:
        self._runner = runner
        if limits.prefix_blocks:
            runner.keep_blocks(limits.prefix_blocks, limits.chunk_tokens)
        self._vocabulary = vocabulary
        self._scheduler = Scheduler(limits, vocabulary)
        self._sampler = load_sampler(vocabulary.eos_ids)
        self._speculation = speculation or Speculation()
        self._guesses = True
        self._prefill, self._decode = Rate(), Rate()
        self._pace = Pace(limits.step_tokens)
        self._now_s = now_s

    @property
    def limits(self) -> Limits:
        """What it has room for."""
        return self._scheduler.limits

    @property
    def fingerprint(self) -> str:
        chunk_tokens = self._scheduler.limits.chunk_tokens  # a piece's bits may follow its length
        return f"{self._runner.fingerprint}-{chunk_tokens}-{self._sampler.fingerprint}"

    def guess(self, wanted: bool) -> None:
        """Whether tokens are guessed where that is likely to be faster, as is done unless told otherwise; no answer
        depends on it."""
        self._guesses = wanted

    def add(self, sequence: Sequence) -> None:
        self._pace.came(sequence.key, self._now_s() * 1_000)
        self._scheduler.add(sequence)

    def cancel(self, key: Key) -> None:
        self._scheduler.cancel(key)

    def drop(self, shard: int, epoch: int) -> None:
        self._scheduler.drop(shard, epoch)

    def admit(self) -> Seq[Key]:
        return self._scheduler.running_keys() if self._scheduler.admit() else ()

    def step(self) -> Seq[Emission]:
        emissions = self._scheduler.settled()
        self._scheduler.admit()
        held_tokens, began_s = self._scheduler.held_tokens(), self._now_s()
        planned = self._scheduler.plan(
            *self._pace.next_prompts(self._scheduler.prompts(), held_tokens, began_s * 1_000)
        )
        if planned:
            work = self._speculation.extended(planned) if self._guesses else planned
            logits = self._run(work)
            self._scheduler.ran(planned)
            drawn = self._draw(work, logits)
            emissions += drawn
            self._measure(
                work, sum(max(1, len(emission.ids)) for emission in drawn), held_tokens, self._now_s() - began_s
            )
        return self._scheduler.counted(emissions)

    def busy(self) -> bool:
        return self._scheduler.busy()

    def load(self) -> Load:
        return msgspec.structs.replace(
            self._scheduler.load(),
            prefill_tokens_per_s=self._prefill.per_s,
            decode_tokens_per_s=self._decode.per_s,
            step=self._pace.times.cost(self._scheduler.held_tokens(), self._scheduler.limits.step_tokens),
        )

    def prefixes(self) -> Prefixes | None:
        return self._scheduler.prefixes()

    def _run(self, work: Seq[Work]) -> Logits:
        """The step's numbers, of the tokens that there are: a model's rows may be filled up to a rounder number."""
        return self._runner.run(work)[:, : self._vocabulary.vocab_size]

    def _draw(self, work: Seq[Work], logits: Logits) -> list[Emission]:
        """One emission a choice, of its next token and of those that were guessed rightly."""
        said = self._score_prompts(work, logits)
        turns = _turns(work)
        while turns:
            drawn = self._sampler.draw(logits, [(turn.row, turn.generation) for turn in turns])
            after = []
            for turn, got in zip(turns, drawn, strict=True):
                generation = turn.generation
                if not self._scheduler.runs(generation):  # a sibling just failed
                    continue
                emission = self._advance(generation, got)
                before = said.get(generation)
                said[generation] = emission if before is None else joined(before, emission)
                if turn.guesses and turn.guesses[:1] == emission.ids and emission.end is None:
                    generation.computed += 1
                    after.append(_Turn(generation, turn.row + 1, turn.guesses[1:]))
            turns = after
        return list(said.values())

    def _score_prompts(self, work: Seq[Work], logits: Logits) -> dict[Generation, Emission]:
        """How likely the model found the prompts' tokens, where asked for; the last words of those that fail."""
        said, row = {}, 0
        for item in work:
            rows, row = logits[row : row + item.rows], row + item.rows
            if item.scored is None:
                continue
            sequence = item.scored.sequence
            tokens = sequence.prompt[item.start + 1 : item.start + len(item.ids) + 1]
            try:
                count = sequence.prompt_logprobs or 0
                item.scored.score(item.start, self._sampler.score(rows[: len(tokens)], tokens, count))
            except SamplingFailed as exc:
                said[item.scored] = self._fail(item.scored, exc)
        return said

    def _advance(self, generation: Generation, got: Drawn | SamplingFailed) -> Emission:
        if isinstance(got, SamplingFailed):
            return self._fail(generation, got)
        emission = generation.take(*got)
        self._pace.drew(generation.sequence.key, generation.choice, self._now_s() * 1_000)
        if emission.end is not None:
            self._scheduler.end(generation)
        return emission

    def _fail(self, generation: Generation, why: SamplingFailed) -> Emission:
        self._scheduler.cancel(generation.sequence.key)
        return generation.fail(str(why))

    def _measure(self, work: Seq[Work], tokens: int, held_tokens: int, seconds: float) -> None:
        """Steps that only prefill or only decode tell how fast each goes."""
        prompts = sum(len(item.ids) for item in work if not item.stepwise)
        decodes = any(item.stepwise for item in work)
        self._pace.times.add(prompt_tokens=prompts, decodes=decodes, held_tokens=held_tokens, ms=seconds * 1_000)
        self._pace.keep(((g.sequence.key, g.choice) for g in self._scheduler.running()), self._scheduler.waiting())
        self._speculation.took(work, seconds * 1_000)
        if not prompts:
            self._decode.add(tokens, seconds)
        elif prompts * 2 > sum(len(item.ids) for item in work):
            self._prefill.add(prompts, seconds)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A row to draw from, and what is guessed to come of it and after it."""

    generation: Generation
    row: int
    guesses: tuple[int, ...]


def _turns(work: Seq[Work]) -> list[_Turn]:
    """The first row of each choice that draws."""
    turns, row = [], 0
    for item in work:
        row += item.rows
        guesses = item.ids[len(item.ids) - item.guesses :]
        turns += [_Turn(generation, row - 1 - item.guesses, guesses) for generation in item.draws]
    return turns


def load_engine(
    model_dir: Path, vocabulary: Vocabulary, limits: Limits, *, threads: int, numerics: str | None = None
) -> TorchEngine:
    """The engine of a model directory, warm; `numerics` as for `load_runner`. ModelUnusable."""
    runner = load_runner(
        model_dir, slots=limits.slots, context_tokens=limits.context_tokens, threads=threads, numerics=numerics
    )
    if runner.vocab_size < vocabulary.vocab_size:
        raise ModelUnusable(f"{model_dir}: the tokenizer has more tokens than the model")
    return TorchEngine(runner, vocabulary, limits)
