"""From logits to tokens: for each row a pure function of that row, its choice's past and its draw.

Rows are taken sixteen at a time: what must pass over every id is done for them together (see `shares`), and what is
left concerns few ids of one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wire.messages import Logprob, Sampling
from workers.engine.draws import uniform
from workers.engine.errors import SamplingFailed
from workers.engine.generation import Generation
from workers.engine.shares import PEAK_IDS, SUM_IDS, Floats, Softmax, peaks_of

Ids = npt.NDArray[np.int64]
Drawn = tuple[int, Logprob | None]
_TILE_ROWS = 16
"""what their passes work on stays in the cache"""
_FIRST_LIKELIEST = 64
_MORE_LIKELIEST = 8
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


class Sampler:
    """Draws for all rows of a step."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._shares, self._models_own = Softmax(), Softmax()

    def draw(self, logits: Floats, asks: Sequence[tuple[int, Generation]]) -> list[Drawn | SamplingFailed]:
        """For each (row of the logits, choice) the next token, and its logprob if asked for.

        SamplingFailed, as a value, for a row that holds no usable numbers: the others go on.
        """
        return [
            drawn
            for begin in range(0, len(asks), _TILE_ROWS)
            for drawn in self._tile(logits, asks[begin : begin + _TILE_ROWS])
        ]

    def _tile(self, logits: Floats, asks: Sequence[tuple[int, Generation]]) -> list[Drawn | SamplingFailed]:
        rows = _taken(logits, [row for row, _ in asks])
        peaks = peaks_of(rows)
        usable = np.isfinite(peaks.max(axis=1))
        good = [
            _Ask(generation, row, highest, _adjusted(row, generation, self._eos_ids))
            for row, highest, fine, (_, generation) in zip(rows, peaks, usable, asks, strict=True)
            if fine
        ]
        drawn = iter(self._drawn(good, rows))
        failed = SamplingFailed("the model gave no usable numbers for this request")
        return [next(drawn) if fine else failed for fine in usable]

    def _drawn(self, asks: list[_Ask], rows: Floats) -> list[Drawn]:
        warm = [ask for ask in asks if ask.sampling.temperature > 0]
        tokens = {id(ask): int(ask.scores.argmax()) for ask in asks if ask.sampling.temperature <= 0}
        highest: dict[int, float] = {}
        if warm:
            shares, sums = self._shares(_together(warm, rows), [ask.sampling.temperature for ask in warm])
            tokens |= zip(map(id, warm), _fallen(warm, shares, sums), strict=True)
            highest = {id(ask): _highest(ask, own) for ask, own in zip(warm, shares, strict=True) if ask.plain}
        wanting = [
            ask
            for ask in asks
            if ask.generation.sequence.logprobs is not None and tokens[id(ask)] not in self._eos_ids
        ]
        if others := [ask for ask in wanting if id(ask) not in highest]:
            own = self._models_own([ask.raw for ask in others], [1.0] * len(others))[0]
            highest |= {id(ask): _highest(ask, share) for ask, share in zip(others, own, strict=True)}
        shown = {id(ask): _logprob(ask, tokens[id(ask)], highest[id(ask)]) for ask in wanting}
        return [(tokens[id(ask)], shown.get(id(ask))) for ask in asks]


def score(logits: Floats, tokens: Sequence[int], count: int) -> list[Logprob]:
    """The logprob of a token in each row, and of the `count` likeliest there. SamplingFailed."""
    softmax, out = Softmax(), list[Logprob]()
    for begin in range(0, len(tokens), _TILE_ROWS):
        rows = logits[begin : begin + _TILE_ROWS]
        peaks = peaks_of(rows)
        if not np.isfinite(peaks.max(axis=1)).all():
            raise SamplingFailed("the model gave no usable numbers for this request")
        own = softmax(rows, [1.0] * len(rows))[0]
        for row, highest, share, token in zip(rows, peaks, own, tokens[begin : begin + _TILE_ROWS], strict=True):
            out.append(logprob_of(row, highest, float(share[row.argmax()]), token, count))
    return out


def logprob_of(logits: Floats, peaks: Floats, share: float, token: int, count: int) -> Logprob:
    """Natural logarithm of the token's probability under the model itself, and the `count` most likely tokens.

    `share`: the probability of the likeliest token.
    """
    shift = float(np.log(share)) - float(peaks.max())
    if not count:
        return Logprob(float(logits[token]) + shift)
    ids, values = _largest(logits, peaks, count)
    first = np.lexsort((ids, -values))[:count]
    top = tuple((int(ids[at]), float(values[at]) + shift) for at in first)
    return Logprob(float(logits[token]) + shift, top)


def _logprob(ask: _Ask, token: int, share: float) -> Logprob:
    return logprob_of(ask.raw, ask.raw_peaks, share, token, ask.generation.sequence.logprobs or 0)


def _highest(ask: _Ask, shares: Floats) -> float:
    return float(shares[ask.raw.argmax()])


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


def _fallen(asks: list[_Ask], shares: Floats, sums: Floats) -> list[int]:
    """The token in whose share of the probability, in order of ids, each ask's draw falls."""
    drawn = [uniform(ask.sampling.seed, ask.generation.choice, len(ask.generation.ids)) for ask in asks]
    bound = [at for at, ask in enumerate(asks) if limits(ask.sampling)]
    tokens = fall(shares, sums, np.array(drawn)) if len(bound) < len(asks) else [0] * len(asks)
    if bound:
        peaks = peaks_of(shares)
        for at in bound:
            tokens[at] = pick(shares[at], peaks[at], asks[at].sampling, drawn[at])
    return tokens


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
    whole, least = float(shares.sum(dtype=np.float64)), max(sampling.min_p * float(peaks.max()), _LEAST)
    limited = 0 < sampling.top_k < len(shares)
    values = _largest(shares, peaks, sampling.top_k if limited else _FIRST_LIKELIEST)[1]
    if limited:
        kth = np.partition(values, -sampling.top_k)[-sampling.top_k]
        values = values[values >= kth]
        whole, least = float(values.sum(dtype=np.float64)), max(least, float(kth))
    if sampling.top_p < 1:
        count = len(shares) if limited else _FIRST_LIKELIEST
        while values.sum(dtype=np.float64) < sampling.top_p * whole and count < len(shares):
            count *= _MORE_LIKELIEST
            values = _largest(shares, peaks, count)[1]
        least = max(least, _last_of(values, sampling.top_p * whole))
    ids, left = _at_least(shares, peaks, least)
    reached = left.cumsum(dtype=np.float64)
    return int(ids[min(int(np.searchsorted(reached, drawn * reached[-1], side="right")), len(ids) - 1)])


def _last_of(values: Floats, wanted: float) -> float:
    """The last of the fewest of the largest that add up to what is wanted."""
    descending = np.sort(values)[::-1]
    last = int(np.searchsorted(descending.cumsum(dtype=np.float64), wanted))
    return float(descending[min(last, len(descending) - 1)])


def _largest(row: Floats, peaks: Floats, count: int) -> tuple[Ids, Floats]:
    """At least the `count` largest of a row and their equals: nothing that is left out is larger than any of them."""
    if count >= len(row):
        return np.arange(len(row)), row
    of = peaks if count <= len(peaks) else row
    return _at_least(row, peaks, float(np.partition(of, -count)[-count]))


def _at_least(row: Floats, peaks: Floats, least: float) -> tuple[Ids, Floats]:
    """The ids of what isn't smaller than `least`, in order, and their values."""
    blocks = np.flatnonzero(peaks >= least)
    ids = (blocks[:, None] * PEAK_IDS + np.arange(PEAK_IDS)).ravel()
    if len(ids) and ids[-1] >= len(row):
        ids = ids[ids < len(row)]
    values = row[ids]
    kept = values >= least
    return ids[kept], values[kept]


def _adjusted(row: Floats, generation: Generation, eos_ids: frozenset[int]) -> Floats:
    """Penalties, bias, and endings that may not come yet, in that order; the row itself where there are none."""
    sampling, ids = generation.sequence.sampling, generation.ids
    counted = ids and (sampling.presence_penalty or sampling.frequency_penalty)
    if not (sampling.repetition_penalty != 1 or counted or sampling.logit_bias or generation.bars_eos):
        return row
    scores = row.copy()
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.array((*generation.sequence.prompt, *ids)))
        factor = np.where(scores[seen] > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        scores[seen] *= factor.astype(np.float32)
    if counted:
        tokens, counts = np.unique(np.array(ids), return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        scores[tokens] -= penalties.astype(np.float32)
    for token, bias in sampling.logit_bias.items():
        scores[int(token)] += np.float32(bias)
    if generation.bars_eos:
        scores[list(eos_ids)] = -np.inf
    return scores
