"""Draws by the native kernels: one call for all rows of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wire.messages import Logprob
from workers.engine.drawing import UNUSABLE, Drawn, Floats, Uniform
from workers.engine.errors import SamplingFailed
from workers.engine.generation import Generation
from workers.engine.native import library
from workers.engine.native.build import LIBRARY

_WORD = (1 << 64) - 1


class NativeSampler:
    """A whole row is one thread's: its numbers are the same in any company and on any number of threads."""

    def __init__(self, kernels: ctypes.CDLL, eos_ids: frozenset[int], uniform: Uniform | None = None) -> None:
        """`uniform`: where draws come from; None = the kernels' own, which are `draws.uniform`'s."""
        self._kernels = kernels
        self._eos_ids = eos_ids
        self._ends = array("q", sorted(eos_ids))
        self._uniform = uniform

    @property
    def fingerprint(self) -> str:
        return LIBRARY.digest

    def draw(self, logits: Floats, asks: Sequence[tuple[int, Generation]]) -> list[Drawn | SamplingFailed]:
        described = (library.Ask * len(asks))()
        first, row_bytes = logits.ctypes.data, logits.strides[0]
        failed: dict[int, SamplingFailed] = {}
        for at, (row, generation) in enumerate(asks):
            try:
                self._describe(described[at], generation)
                described[at].row = first + row * row_bytes
            except SamplingFailed as exc:
                failed[at] = exc
        answers = self._call(logits.shape[1], described)
        drawn = list[Drawn | SamplingFailed]()
        for at, (token, (_, generation)) in enumerate(zip(answers.tokens, asks, strict=True)):
            if token < 0:
                drawn.append(failed.get(at) or SamplingFailed(UNUSABLE))
            elif (count := generation.sequence.logprobs) is None or token in self._eos_ids:
                drawn.append((token, None))
            else:
                drawn.append((token, answers.logprob(at, count)))
        return drawn

    def score(self, logits: Floats, tokens: Sequence[int], count: int) -> list[Logprob]:
        described = (library.Ask * len(tokens))()
        first, row_bytes = logits.ctypes.data, logits.strides[0]
        for at, (ask, token) in enumerate(zip(described, tokens, strict=True)):
            ask.row, ask.given, ask.shown = first + at * row_bytes, token, count
        answers = self._call(logits.shape[1], described)
        if any(token < 0 for token in answers.tokens):
            raise SamplingFailed(UNUSABLE)
        return [answers.logprob(at, count) for at in range(len(tokens))]

    def _describe(self, ask: library.Ask, generation: Generation) -> None:
        """All but the row. SamplingFailed where the grammar can't say what may come."""
        sequence, shifts = generation.sequence, generation.shifts
        sampling, choice, position = sequence.sampling, generation.choice, len(generation.ids)
        ask.given = -1
        ask.seed_low, ask.seed_high = sampling.seed & _WORD, (sampling.seed >> 64) & _WORD
        ask.choice, ask.position = choice, position
        ask.drawn = -1.0 if self._uniform is None else self._uniform(sampling.seed, choice, position)
        ask.temperature, ask.top_k = sampling.temperature, sampling.top_k
        ask.top_p, ask.min_p = sampling.top_p, sampling.min_p
        ask.shown = -1 if sequence.logprobs is None else sequence.logprobs
        ask.bars_ends = generation.bars_eos
        if shifts.seen_ids:
            ask.repetition = sampling.repetition_penalty
            ask.presence, ask.frequency = sampling.presence_penalty, sampling.frequency_penalty
            ask.seen_ids, ask.seen = shifts.seen_ids.buffer_info()
            ask.seen_counts, _ = shifts.seen_counts.buffer_info()
        if shifts.biases:
            ask.biased_ids, ask.biased = shifts.biased_ids.buffer_info()
            ask.biases, _ = shifts.biases.buffer_info()
        if generation.matcher is not None and (mask := generation.matcher.allowed()) is not None:
            ask.mask, ask.mask_bytes = mask, len(mask)

    def _call(self, ids: int, asks: ctypes.Array[library.Ask]) -> _Answers:
        count, most = len(asks), min(ids, max((0, *(ask.shown for ask in asks))))
        tokens, logprobs = np.empty(count, np.int64), np.empty(count)
        shown_ids, shown_logprobs = np.empty((count, most), np.int64), np.empty((count, most))
        step = library.Draw(
            ids=ids,
            asks=count,
            ask=asks,
            ends=len(self._ends),
            end_ids=self._ends.buffer_info()[0],
            threads=torch.get_num_threads(),
            most_shown=most,
            tokens=tokens.ctypes.data,
            logprobs=logprobs.ctypes.data,
            shown_ids=shown_ids.ctypes.data,
            shown_logprobs=shown_logprobs.ctypes.data,
        )
        if count:
            self._kernels.millstream_draw(ctypes.byref(step))
        return _Answers(tokens.tolist(), logprobs.tolist(), shown_ids.tolist(), shown_logprobs.tolist())


@dataclass(frozen=True, slots=True)
class _Answers:
    """To each ask a token (−1: the row has no usable numbers), and what its logprobs are where they are wanted."""

    tokens: list[int]
    logprobs: list[float]
    shown_ids: list[list[int]]
    shown_logprobs: list[list[float]]

    def logprob(self, at: int, count: int) -> Logprob:
        top = zip(self.shown_ids[at][:count], self.shown_logprobs[at][:count], strict=True)
        return Logprob(self.logprobs[at], tuple(top))
