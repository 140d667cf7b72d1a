"""From logits to a token, for one choice at a time: a pure function of its logits, its past and its draw."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wire.messages import Logprob, Sampling
from workers.engine.draws import uniform
from workers.engine.errors import SamplingFailed
from workers.engine.generation import Generation

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
_BLOCK = 256


def draw(logits: Logits, generation: Generation, eos_ids: frozenset[int]) -> tuple[int, Logprob | None]:
    """The next token of a choice, and its logprob if asked for. SamplingFailed when the logits aren't numbers."""
    if not np.isfinite(logits).all():
        raise SamplingFailed("the model gave no usable numbers for this request")
    sampling = generation.sequence.sampling
    scores = _adjusted(logits.astype(np.float64), generation, sampling, eos_ids)
    if generation.matcher is not None:
        scores = narrowed(scores, generation.matcher.allowed())
        if np.isneginf(scores.max()):  # only an end can follow: it comes, whatever `min_tokens` says
            return min(eos_ids), None
    token = (
        int(scores.argmax())
        if sampling.temperature <= 0
        else pick(scores, sampling, uniform(sampling.seed, generation.choice, len(generation.ids)))
    )
    count = generation.sequence.logprobs
    return token, None if count is None or token in eos_ids else logprob_of(logits, token, count)


def pick(scores: Floats, sampling: Sampling, drawn: float) -> int:
    """The token in whose share of the probability, in order of ids, the number `drawn` from [0, 1) falls."""
    with np.errstate(over="ignore"):  # all but the likeliest vanish when the temperature is tiny
        shares = _exponential((scores - scores.max()) / sampling.temperature)
    _keep_top_k(shares, sampling.top_k)
    _keep_top_p(shares, sampling.top_p)
    shares[shares < sampling.min_p * shares.max()] = 0
    return _fall(shares, drawn)


def narrowed(scores: Floats, allowed: bytes | None) -> Floats:
    """Scores without the tokens that a grammar doesn't allow; `allowed` as `Matcher.allowed` gives it."""
    if allowed is None:
        return scores
    bits = np.unpackbits(np.frombuffer(allowed, np.uint8), count=len(scores), bitorder="little")
    return np.where(bits.view(np.bool_), scores, -np.inf)


def logprob_of(logits: Logits, token: int, count: int) -> Logprob:
    """Natural logarithm of the token's probability under the model itself, and the `count` most likely tokens."""
    scores = logits.astype(np.float64)
    highest = scores.max()
    scores -= highest + np.log(_exponential(scores - highest).sum())
    if not count:
        return Logprob(float(scores[token]))
    least = np.partition(scores, -count)[-count]
    likely = np.flatnonzero(scores >= least)
    first = likely[np.lexsort((likely, -scores[likely]))][:count]
    return Logprob(float(scores[token]), tuple((int(other), float(scores[other])) for other in first))


def _exponential(scores: Floats) -> Floats:
    """eˣ to seven digits, which is four times as fast as to sixteen and finer than the logits are."""
    return np.exp(scores.astype(np.float32)).astype(np.float64)


def _fall(shares: Floats, drawn: float) -> int:
    """Where `drawn` of the sum of all shares is reached: first by blocks, then within one."""
    reached = np.cumsum(np.add.reduceat(shares, np.arange(0, len(shares), _BLOCK)))
    target = drawn * reached[-1]
    block = min(int(np.searchsorted(reached, target, side="right")), int(np.searchsorted(reached, reached[-1])))
    begin = block * _BLOCK
    inner = shares[begin : begin + _BLOCK]
    at = np.searchsorted((reached[block - 1] if block else 0.0) + np.cumsum(inner), target, side="right")
    return begin + min(int(at), int(np.flatnonzero(inner)[-1]))  # rounding may carry the target past the last


def _adjusted(scores: Floats, generation: Generation, sampling: Sampling, eos_ids: frozenset[int]) -> Floats:
    """Penalties, bias, and endings that may not come yet, in that order."""
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.array((*generation.sequence.prompt, *generation.ids)))
        factor = np.where(scores[seen] > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        scores[seen] *= factor
    if generation.ids and (sampling.presence_penalty or sampling.frequency_penalty):
        tokens, counts = np.unique(np.array(generation.ids), return_counts=True)
        scores[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    for token, bias in sampling.logit_bias.items():
        scores[int(token)] += bias
    if generation.bars_eos:
        scores[list(eos_ids)] = -np.inf
    return scores


def _keep_top_k(shares: Floats, top_k: int) -> None:
    """Drop what is less likely than the k-th; equals of the k-th stay, so that the order of ids decides nothing."""
    if 0 < top_k < len(shares):
        shares[shares < np.partition(shares, -top_k)[-top_k]] = 0


def _keep_top_p(shares: Floats, top_p: float) -> None:
    """Keep the fewest of the most likely that hold `top_p` of the probability, and equals of the last of them."""
    if top_p >= 1:
        return
    whole = shares.sum()
    # all that is smaller than this holds less than 1 - top_p together: it needn't be sorted
    descending = np.sort(shares[shares >= (1 - top_p) * whole / len(shares)])[::-1]
    last = np.searchsorted(np.cumsum(descending), top_p * whole)
    shares[shares < descending[min(int(last), len(descending) - 1)]] = 0
