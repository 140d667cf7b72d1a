"""The engine with a real model: schedule → run → sample → emit."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec

from workers.engine.errors import ModelUnusable, SamplingFailed
from workers.engine.generation import Generation
from workers.engine.pace import Pace
from workers.engine.protocol import Emission, Key, Load, Sequence
from workers.engine.rates import Rate
from workers.engine.runner import Logits, Runner, load_runner
from workers.engine.sampler import draw
from workers.engine.scheduler import Limits, Scheduler, Work
from workers.engine.vocabulary import Vocabulary


class TorchEngine:
    """Implements `workers.engine.protocol.Engine`."""

    def __init__(
        self,
        runner: Runner,
        vocabulary: Vocabulary,
        limits: Limits,
        *,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._vocabulary = vocabulary
        self._scheduler = Scheduler(limits, vocabulary)
        self._prefill, self._decode = Rate(), Rate()
        self._pace = Pace(limits.step_tokens)
        self._now_s = now_s

    @property
    def fingerprint(self) -> str:
        return self._runner.fingerprint

    def add(self, sequence: Sequence) -> None:
        self._pace.came(sequence.key, self._now_s() * 1_000)
        self._scheduler.add(sequence)

    def cancel(self, key: Key) -> None:
        self._scheduler.cancel(key)

    def drop(self, shard: int, epoch: int) -> None:
        self._scheduler.drop(shard, epoch)

    def step(self) -> Seq[Emission]:
        emissions = self._scheduler.settled()
        self._scheduler.admit()
        held_tokens, began_s = self._scheduler.held_tokens(), self._now_s()
        work = self._scheduler.plan(*self._pace.next_prompts(self._scheduler.prompts(), held_tokens, began_s * 1_000))
        if work:
            logits = self._runner.run(work)
            self._scheduler.ran(work)
            emissions += self._sample(work, logits)
            self._measure(work, held_tokens, self._now_s() - began_s)
        return emissions

    def busy(self) -> bool:
        return self._scheduler.busy()

    def load(self) -> Load:
        return msgspec.structs.replace(
            self._scheduler.load(),
            prefill_tokens_per_s=self._prefill.per_s,
            decode_tokens_per_s=self._decode.per_s,
            step=self._pace.times.cost(self._scheduler.held_tokens(), self._scheduler.limits.step_tokens),
        )

    def _sample(self, work: Seq[Work], logits: Logits) -> list[Emission]:
        drawing = [item for item in work if item.draws]
        return [
            self._advance(generation, row)
            for item, row in zip(drawing, logits, strict=True)
            for generation in item.draws
            if self._scheduler.runs(generation)  # not if a sibling just failed
        ]

    def _advance(self, generation: Generation, row: Logits) -> Emission:
        try:
            token, logprob = draw(row, generation, self._vocabulary.eos_ids)
        except SamplingFailed as exc:
            self._scheduler.cancel(generation.sequence.key)
            return generation.fail(str(exc))
        emission = generation.take(token, logprob)
        self._pace.drew(generation.sequence.key, generation.choice, self._now_s() * 1_000)
        if emission.end is not None:
            self._scheduler.end(generation)
        return emission

    def _measure(self, work: Seq[Work], held_tokens: int, seconds: float) -> None:
        """Steps that only prefill or only decode tell how fast each goes."""
        prompts = sum(len(item.ids) for item in work if not item.stepwise)
        decodes = any(item.stepwise for item in work)
        self._pace.times.add(prompt_tokens=prompts, decodes=decodes, held_tokens=held_tokens, ms=seconds * 1_000)
        self._pace.keep(((g.sequence.key, g.choice) for g in self._scheduler.running()), self._scheduler.waiting())
        if not prompts:
            self._decode.add(len(work), seconds)
        elif prompts * 2 > sum(len(item.ids) for item in work):
            self._prefill.add(prompts, seconds)


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
