"""Draws by numpy and torch: the sampler of machines that can't have the native one.

Rows are taken sixteen at a time: what must pass over every id is done for them together (see `shares`), and what is
left concerns few ids of one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wire.messages import Logprob, Sampling
from workers.engine import draws
from workers.engine.drawing import UNUSABLE, Drawn, Floats, Uniform
from workers.engine.errors import SamplingFailed
from workers.engine.generation import Generation
from workers.engine.shares import PEAK_IDS, SUM_IDS, Softmax, peaks_of

Ids = npt.NDArray[np.int64]
_TILE_ROWS = 16
"""what their passes work on stays in the cache"""
_FIRST_LIKELIEST = 64
_MORE_LIKELIEST = 8
_IN_BLOCK = np.arange(PEAK_IDS)
_LEAST = float(np.finfo(np.float32).smallest_subnormal)
"""what is drawn has a share"""


@dataclass(slots=True)
class _Ask:
    """One row and the choice whose next token it gives."""

    generation: Generation
    raw: Floats
    """the model's own logits"""
    raw_peaks: Floats
    scores: Floats
    """after penalties and bias; `raw` itself where there are none"""

    @property
    def sampling(self) -> Sampling:
        return self.generation.sequence.sampling

    @property
    def plain(self) -> bool:
        """Whether the shares it is drawn by are the model's own."""
        return self.scores is self.raw and self.sampling.temperature == 1

    @property
    def wants_logprob(self) -> bool:
        return self.generation.sequence.logprobs is not None

    def logprob(self, token: int, shares: Floats) -> Logprob:
        """`shares`: the model's own."""
        return _logprob(self.raw, self.raw_peaks, shares, token, self.generation.sequence.logprobs or 0)


class PlainSampler:
    """Draws for all rows of a step."""

    def __init__(self, eos_ids: frozenset[int], uniform: Uniform = draws.uniform) -> None:
        self._eos_ids = eos_ids
        self._uniform = uniform
        self._shares, self._models_own = Softmax(), Softmax()

    @property
    def fingerprint(self) -> str:
        return "plain"

    def draw(self, logits: Floats, asks: Sequence[tuple[int, Generation]]) -> list[Drawn | SamplingFailed]:
        return [
            drawn
            for begin in range(0, len(asks), _TILE_ROWS)
            for drawn in self._tile(logits, asks[begin : begin + _TILE_ROWS])
        ]

    def score(self, logits: Floats, tokens: Sequence[int], count: int) -> list[Logprob]:
        out = list[Logprob]()
        for begin in range(0, len(tokens), _TILE_ROWS):
            rows = logits[begin : begin + _TILE_ROWS]
            peaks = peaks_of(rows)
            if not np.isfinite(peaks.max(axis=1)).all():
                raise SamplingFailed(UNUSABLE)
            shares, _ = self._models_own(rows, [1.0] * len(rows))
            for row, highest, own, token in zip(rows, peaks, shares, tokens[begin:], strict=False):
                out.append(_logprob(row, highest, own, token, count))
        return out

    def _tile(self, logits: Floats, asks: Sequence[tuple[int, Generation]]) -> list[Drawn | SamplingFailed]:
        rows = _taken(logits, [row for row, _ in asks])
        peaks = peaks_of(rows)
        made = [self._ask(*each) for each in zip((generation for _, generation in asks), rows, peaks, strict=True)]
        drawn = iter(self._drawn([ask for ask in made if isinstance(ask, _Ask)], rows))
        return [next(drawn) if isinstance(ask, _Ask) else ask for ask in made]

    def _ask(self, generation: Generation, row: Floats, peaks: Floats) -> _Ask | SamplingFailed:
        """What a row is drawn from; SamplingFailed, as a value, where nothing can be."""
        if not np.isfinite(peaks.max()):
            return SamplingFailed(UNUSABLE)
        try:
            scores = _bound(_adjusted(row, generation, self._eos_ids), generation, self._eos_ids)
        except SamplingFailed as exc:
            return exc
        return _Ask(generation, row, peaks, scores)

    def _drawn(self, asks: list[_Ask], rows: Floats) -> list[Drawn]:
        warm = [ask for ask in asks if ask.sampling.temperature > 0]
        tokens = {id(ask): int(ask.scores.argmax()) for ask in asks if ask.sampling.temperature <= 0}
        models_own: dict[int, Floats] = {}
        if warm:
            shares, sums = self._shares(_together(warm, rows), [ask.sampling.temperature for ask in warm])
            tokens |= zip(map(id, warm), self._fallen(warm, shares, sums), strict=True)
            models_own = {id(ask): own for ask, own in zip(warm, shares, strict=True) if ask.plain}
        wanting = [ask for ask in asks if ask.wants_logprob and tokens[id(ask)] not in self._eos_ids]
        if others := [ask for ask in wanting if id(ask) not in models_own]:
            own, _ = self._models_own([ask.raw for ask in others], [1.0] * len(others))
            models_own |= zip(map(id, others), own, strict=True)
        shown = {id(ask): ask.logprob(tokens[id(ask)], models_own[id(ask)]) for ask in wanting}
        return [(tokens[id(ask)], shown.get(id(ask))) for ask in asks]

    def _fallen(self, asks: list[_Ask], shares: Floats, sums: Floats) -> list[int]:
        """The token in whose share of the probability, in order of ids, each ask's draw falls."""
        drawn = [self._uniform(ask.sampling.seed, ask.generation.choice, len(ask.generation.ids)) for ask in asks]
        bound = [at for at, ask in enumerate(asks) if limits(ask.sampling)]
        tokens = fall(shares, sums, np.array(drawn)) if len(bound) < len(asks) else [0] * len(asks)
        if bound:
            peaks = peaks_of(shares)
            for at in bound:
                tokens[at] = pick(shares[at], peaks[at], asks[at].sampling, drawn[at])
        return tokens


def narrowed(scores: Floats, allowed: bytes | None) -> Floats:
    """Scores without the tokens that a grammar doesn't allow; `allowed` as `Matcher.allowed` gives it."""
    if allowed is None:
        return scores
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=len(scores), bitorder="little")
    return np.where(bits.view(np.bool_), scores, np.float32(-np.inf))


def _bound(scores: Floats, generation: Generation, eos_ids: frozenset[int]) -> Floats:
    """What a choice's grammar leaves. Where only an end can follow it comes, whatever `min_tokens` says.

    SamplingFailed where the grammar can't say.
    """
    if generation.matcher is None:
        return scores
    left = narrowed(scores, generation.matcher.allowed())
    if np.isneginf(left.max()):
        left = np.full_like(left, -np.inf)
        left[min(eos_ids)] = 0
    return left


def _logprob(logits: Floats, peaks: Floats, shares: Floats, token: int, count: int) -> Logprob:
    """Natural logarithm of the token's probability under the model itself, and the `count` most likely tokens."""
    likeliest = int(logits.argmax())
    shift = math.log(shares[likeliest]) - float(logits[likeliest])
    if not count:
        return Logprob(float(logits[token]) + shift)
    ids, values = _largest(logits, peaks, count)
    first = np.lexsort((ids, -values))[:count]
    top = zip(ids[first].tolist(), (values[first].astype(np.float64) + shift).tolist(), strict=True)
    return Logprob(float(logits[token]) + shift, tuple(top))


def _taken(logits: Floats, rows: list[int]) -> Floats:
    """These rows; without a copy where they follow one another."""
    first = rows[0]
    if rows == list(range(first, first + len(rows))):
        return logits[first : first + len(rows)]
    return logits[rows]


def _together(warm: list[_Ask], rows: Floats) -> list[Floats] | Floats:
    """Their scores, as one array where they are the tile's rows as they came."""
    if len(warm) == len(rows) and all(ask.scores is ask.raw for ask in warm):
        return rows
    return [ask.scores for ask in warm]


def limits(sampling: Sampling) -> bool:
    """Whether some tokens can't come, however the draw falls."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def fall(shares: Floats, sums: Floats, drawn: npt.NDArray[np.float64]) -> list[int]:
    """Where in each row `drawn`, from [0, 1), of the sum of all shares is reached: first by sums, then within one."""
    reached = sums.cumsum(axis=1, dtype=np.float64)
    whole = reached[:, -1:]
    target = drawn[:, None] * whole
    # rounding may carry the target past the last share that isn't zero
    blocks = np.minimum((reached <= target).sum(axis=1), (reached < whole).sum(axis=1))
    every = np.arange(len(shares))
    inner = shares.reshape(len(shares), -1, SUM_IDS)[every, blocks]
    before = np.where(blocks > 0, reached[every, blocks - 1], 0.0)
    within = before[:, None] + inner.cumsum(axis=1, dtype=np.float64)
    last = SUM_IDS - 1 - (inner[:, ::-1] > 0).argmax(axis=1)
    at = np.minimum((within <= target).sum(axis=1), last)
    return [int(token) for token in blocks * SUM_IDS + at]


def pick(shares: Floats, peaks: Floats, sampling: Sampling, drawn: float) -> int:
    """As `fall`, among what top_k, top_p and min_p leave, in that order.

    Equals of the last that is left stay, so that the order of ids decides nothing.
    """
    least = max(sampling.min_p * float(peaks.max()), _LEAST)
    if 0 < sampling.top_k < len(shares):
        ids, left = _top(shares, peaks, sampling.top_k)
        wanted = sampling.top_p * float(left.sum(dtype=np.float64))
    elif sampling.top_p < 1:
        wanted = sampling.top_p * float(shares.sum(dtype=np.float64))
        ids, left = _holding(shares, peaks, wanted)
    else:
        ids, left = _at_least(shares, peaks, least)
    if sampling.top_p < 1:
        least = max(least, _last_of(left, wanted))
    kept = left >= least
    reached = left[kept].cumsum(dtype=np.float64)
    at = min(int(reached.searchsorted(drawn * reached[-1], side="right")), len(reached) - 1)
    return int(ids[kept][at])


def _last_of(values: Floats, wanted: float) -> float:
    """The last of the fewest of the largest that add up to what is wanted."""
    descending = np.sort(values)[::-1]
    last = int(descending.cumsum(dtype=np.float64).searchsorted(wanted))
    return float(descending[min(last, len(descending) - 1)])


def _holding(row: Floats, peaks: Floats, wanted: float) -> tuple[Ids, Floats]:
    """As many of the largest as add up to what is wanted, and some more; all if rounding leaves even those short."""
    count = _FIRST_LIKELIEST
    while count < len(row):
        ids, values = _largest(row, peaks, count)
        if values.sum(dtype=np.float64) >= wanted:
            return ids, values
        count *= _MORE_LIKELIEST
    return np.arange(len(row)), row


def _top(row: Floats, peaks: Floats, count: int) -> tuple[Ids, Floats]:
    """The `count` largest, and the equals of the last of them."""
    ids, values = _largest(row, peaks, count)
    kept = values >= np.partition(values, -count)[-count]
    return ids[kept], values[kept]


def _largest(row: Floats, peaks: Floats, count: int) -> tuple[Ids, Floats]:
    """At least the `count` largest of a row and their equals: nothing that is left out is larger than any of them."""
    if count >= len(row):
        return np.arange(len(row)), row
    of = peaks if count <= len(peaks) else row
    return _at_least(row, peaks, float(np.partition(of, -count)[-count]))


def _at_least(row: Floats, peaks: Floats, least: float) -> tuple[Ids, Floats]:
    """The ids of what isn't smaller than `least`, in order, and their values."""
    blocks = (peaks >= least).nonzero()[0]
    if len(row) % PEAK_IDS:
        ids = (blocks[:, None] * PEAK_IDS + _IN_BLOCK).ravel()
        ids = ids[ids < len(row)]
        values = row[ids]
        kept = values >= least
        return ids[kept], values[kept]
    values = row.reshape(-1, PEAK_IDS)[blocks]
    where, within = (values >= least).nonzero()
    return blocks[where] * PEAK_IDS + within, values[where, within]


def _adjusted(row: Floats, generation: Generation, eos_ids: frozenset[int]) -> Floats:
    """Penalties, bias, and endings that may not come yet, in that order; the row itself where there are none."""
    sampling, shifts = generation.sequence.sampling, generation.shifts
    if not (shifts.seen_ids or shifts.biases or generation.bars_eos):
        return row
    scores = row.copy()
    seen, counts = np.array(shifts.seen_ids), np.array(shifts.seen_counts)
    if sampling.repetition_penalty != 1:
        factor = np.where(scores[seen] > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        scores[seen] *= factor.astype(np.float32)
    penalties = np.where(counts > 0, sampling.presence_penalty + sampling.frequency_penalty * counts, 0.0)
    scores[seen] -= penalties.astype(np.float32)
    scores[np.array(shifts.biased_ids)] += np.array(shifts.biases).astype(np.float32)
    if generation.bars_eos:
        scores[list(eos_ids)] = -np.inf
    return scores
