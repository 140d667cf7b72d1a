"""Draws by the native kernels: one call for all rows of a step."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from wire.messages import Logprob
from workers.engine.drawing import UNUSABLE, Drawn, Floats, Uniform
from workers.engine.errors import SamplingFailed
from workers.engine.generation import Generation
from workers.engine.native import library
from workers.engine.native.build import source_digest

_WORD = (1 << 64) - 1


class NativeSampler:
    """A whole row is one thread's: its numbers are the same in any company and on any number of threads."""

    def __init__(self, kernels: ctypes.CDLL, eos_ids: frozenset[int], uniform: Uniform | None = None) -> None:
        self._kernels = kernels
        self._eos_ids = eos_ids
        self._ends = array("q", sorted(eos_ids))
        self._uniform = uniform or uniform_by(kernels)

    @property
    def fingerprint(self) -> str:
        return source_digest()

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
        shown = self._call(logits.shape[1], described)
        drawn: list[Drawn | SamplingFailed] = []
        for at, ask in enumerate(described):
            token = ask.token
            if token < 0:
                drawn.append(failed.get(at) or SamplingFailed(UNUSABLE))
            elif ask.shown < 0 or token in self._eos_ids:
                drawn.append((token, None))
            else:
                drawn.append((token, shown.logprob(at, ask)))
        return drawn

    def score(self, logits: Floats, tokens: Sequence[int], count: int) -> list[Logprob]:
        described = (library.Ask * len(tokens))()
        first, row_bytes = logits.ctypes.data, logits.strides[0]
        for at, (ask, token) in enumerate(zip(described, tokens, strict=True)):
            ask.row, ask.given, ask.shown = first + at * row_bytes, token, count
        shown = self._call(logits.shape[1], described)
        if any(ask.token < 0 for ask in described):
            raise SamplingFailed(UNUSABLE)
        return [shown.logprob(at, ask) for at, ask in enumerate(described)]

    def _describe(self, ask: library.Ask, generation: Generation) -> None:
        """All but the row. SamplingFailed where the grammar can't say what may come."""
        sequence, shifts = generation.sequence, generation.shifts
        sampling, position = sequence.sampling, len(generation.ids)
        ask.given = -1
        ask.drawn = self._uniform(sampling.seed, generation.choice, position) if sampling.temperature > 0 else 0.0
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

    def _call(self, ids: int, asks: ctypes.Array[library.Ask]) -> _Shown:
        shown = _Shown(len(asks), min(ids, max((ask.shown for ask in asks), default=0)))
        step = library.Draw(
            ids=ids,
            asks=len(asks),
            ask=asks,
            ends=len(self._ends),
            end_ids=self._ends.buffer_info()[0],
            most_shown=shown.most,
            shown_ids=shown.ids.ctypes.data,
            shown_logprobs=shown.logprobs.ctypes.data,
            threads=torch.get_num_threads(),
        )
        if len(asks):
            self._kernels.millstream_draw(ctypes.byref(step))
        return shown


class _Shown:
    """The likeliest tokens of each ask, the most likely first."""

    def __init__(self, asks: int, most: int) -> None:
        self.most = max(0, most)
        self.ids = np.empty((asks, self.most), np.int64)
        self.logprobs = np.empty((asks, self.most), np.float64)

    def logprob(self, at: int, ask: library.Ask) -> Logprob:
        count = min(ask.shown, self.most)
        if not count:
            return Logprob(ask.logprob)
        top = zip(self.ids[at, :count].tolist(), self.logprobs[at, :count].tolist(), strict=True)
        return Logprob(ask.logprob, tuple(top))


def uniform_by(kernels: ctypes.CDLL) -> Uniform:
    """`draws.uniform`, the same numbers sooner."""
    of = kernels.millstream_uniform

    def uniform(seed: int, choice: int, position: int) -> float:
        drawn: float = of(seed & _WORD, (seed >> 64) & _WORD, choice, position)
        return drawn

    return uniform
