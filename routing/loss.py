"""What a request would lose, and make others lose, at each engine: the expected number of broken promises.

With x prompt tokens to compute at an engine, P the time that takes, B the time of the prompts that wait there, d₀ and
d₁ a decode step's time without and with the request:

- the request is late with the chance that age + B + P + decode steps in between exceed the TTFT that is promised;
- it is slow from the start if d₁ exceeds the time between tokens that is promised;
- the engine's time is worth something to those who come next: a price on P and on d₁, the higher the faster the
  engine is (`worth`);
- who decodes there is stalled by B + P instead of B, and then gains on its pace tbt − d₁ a token instead of tbt − d₀.
  Who is behind by y catches up if it has y ÷ (tbt − d) tokens left (`routing.lengths`); who is ahead by y where steps
  are slower than its pace falls behind if it has y ÷ (d − tbt) left. The rise of that chance, over all that are there.

The first three are `own_loss`; the last, `rise`, is never negative and costs more to compute. Each works on all engines
it is given at once, as arrays.

docs/decisions/marginal-goodput.md compares this with what else could be minimised.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from routing.lengths import BUCKET_TOKENS
from routing.schedule import Targets

Floats = NDArray[np.float64]

PREFILL_PRICE = 4.0
"""Requests that an engine's time is worth, a TTFT target of it: an engine serves a few requests in that time.
From half to twice of it goodput changes by less than 0.005"""
DECODE_PRICE = 0.75
"""Requests that a decode step is worth, a TBT target of it: what slows all that will come. Same plateau"""
WAIT_PRICE = 0.01
"""Requests that a wait is worth, a TTFT target of it: of two engines where the request is late, the sooner one, though
hardly more than the rest counts"""
CALM = 0.8
"""Of the TBT target: beyond it the chance to miss it says what a slower step costs, and levelling the steps of engines
that are all that full would bring every one of them over the target at once"""
TTFT_DOUBT = 0.075
"""Standard error of a predicted TTFT, in targets: the rest of a step, what is sent meanwhile, the cost's fit"""
TBT_DOUBT = 0.01
"""The same of a decode step's time, which follows from what the engine holds"""
LEAST_MARGIN = 0.02
"""|tbt − d| is taken to be this many targets at least: nearer the chance would jump"""
WAITING_STALL = 0.5
"""Of the work that waits, a waiting request has half before it and half behind it, which will stall it"""
LOGISTIC = 1.7
"""The logistic function of 1.7 x is within 0.01 of the normal distribution's of x"""


class State(NamedTuple):
    """Engines as they are taken to be now; each array has an entry an engine."""

    backlog_ms: Floats
    """time of the prompts that wait"""
    slot_ms: Floats | float
    """until one more request gets a slot; 0 where one is free"""
    decode_ms: Floats
    """a decode step with all that run and wait"""
    decode_token_ms: Floats
    """what one more token adds to it"""
    fixed_ms: Floats
    token_ms: Floats
    square_ms: Floats
    """a piece of a prompt: `routing.schedule.PrefillCost`"""
    piece_tokens: Floats
    piece_ms: Floats
    """a whole piece"""
    decodes: NDArray[np.bool_]
    """whether anything decodes"""
    gained_ms: Floats
    """what each choice gathered since the engine's signal"""
    rested_ms: Floats
    """what those gathered that waited then and don't any more"""

    @property
    def wait_ms(self) -> Floats:
        """Until the prompt of a request that came now is begun."""
        return self.backlog_ms + self.slot_ms


class Crowd(NamedTuple):
    """Those that are at each engine: a row an engine."""

    behind_ms: Floats
    """how far behind their pace those stand-ins are, or those who wait will be, once what waits before is computed"""
    weights: Floats
    """how many each stands for"""


def prefill_ms(state: State, tokens: Floats) -> tuple[Floats, Floats | float]:
    """Time of a prompt's tokens (at least one) at each engine, and in how many pieces."""
    if (tokens <= state.piece_tokens).all():  # the usual case, by half the operations
        return (state.square_ms * tokens + state.token_ms) * tokens + state.fixed_ms, 1.0
    pieces = np.ceil(tokens / state.piece_tokens)
    rest = tokens - (pieces - 1) * state.piece_tokens
    return (pieces - 1) * state.piece_ms + (state.square_ms * rest + state.token_ms) * rest + state.fixed_ms, pieces


def own_loss(
    state: State,
    *,
    prompt_ms: Floats,
    pieces: Floats | float,
    after_ms: Floats,
    waited_ms: Floats | float,
    worth: Floats,
    targets: Targets,
) -> Floats:
    """The request's own loss at each engine, and the price of its time.

    `prompt_ms`, `pieces`: from `prefill_ms`. `after_ms`: d₁. `waited_ms`: since the request came, until it will be
    there. `worth`: from `worth`.
    """
    between_ms = (state.backlog_ms / state.piece_ms + pieces + 0.5) * state.decode_ms * state.decodes
    loss = _exceeds(waited_ms + state.wait_ms + prompt_ms + between_ms, targets.ttft_ms, TTFT_DOUBT)
    loss += _exceeds(after_ms, targets.tbt_ms, TBT_DOUBT)
    loss += worth * prompt_ms * (PREFILL_PRICE / targets.ttft_ms) + state.wait_ms * (WAIT_PRICE / targets.ttft_ms)
    loss += np.sqrt(worth) * np.minimum(after_ms, CALM * targets.tbt_ms) * (DECODE_PRICE / targets.tbt_ms)
    return loss


def worth(state: State, able: NDArray[np.bool_]) -> Floats:
    """How fast each engine computes prompts, next to the mean of those that are able.

    A prompt's time is priced by so much: in it a faster engine could serve more requests. A decode step is by the
    square root: if a step takes d ÷ (1 − load), total latency is least where d ÷ (1 − load)² is the same at every
    engine (`routing.curve`), so the steps are as √d there. Without this all would go to the faster engines until these
    are as slow as the others; with the whole speed instead of its root, idle slow engines would be preferred.
    """
    speed = state.piece_tokens / state.piece_ms
    share: Floats = speed / speed[able].mean()
    return share


def rise(
    crowd: Crowd, *, prompt_ms: Floats, before_ms: Floats, after_ms: Floats, table: Floats, targets: Targets
) -> Floats:
    """By how many requests more those that are at each engine would miss their pace.

    `before_ms`, `after_ms`: d₀ and d₁. `table`: `Lengths.table`.
    """
    then = _missed(crowd.behind_ms + prompt_ms[:, None], after_ms, crowd.weights, table, targets)
    more: Floats = then - _missed(crowd.behind_ms, before_ms, crowd.weights, table, targets)
    return more


def _missed(behind_ms: Floats, step_ms: Floats, weights: Floats, table: Floats, targets: Targets) -> Floats:
    """How many miss their pace at each engine; behind is negative for who is ahead."""
    margin_ms = targets.tbt_ms - step_ms
    slow = margin_ms < 0
    any_slow = slow.any()
    if any_slow:  # then it is who is ahead that may lose what he has
        behind_ms = np.where(slow[:, None], -behind_ms, behind_ms)
    scale = 1 / (BUCKET_TOKENS * np.maximum(np.abs(margin_ms), LEAST_MARGIN * targets.tbt_ms))
    buckets = np.minimum(np.maximum(behind_ms * scale[:, None], 0.0), len(table) - 1.5) + 0.5
    missed: Floats = np.einsum("ij,ij->i", table[buckets.astype(np.intp)], weights)
    return np.where(slow, weights.sum(axis=1) - missed, missed) if any_slow else missed


def _exceeds(ms: Floats, target_ms: float, doubt: float) -> Floats:
    """The chance that a predicted time exceeds its target."""
    slope = LOGISTIC / (doubt * target_ms)
    chance: Floats = 1 / (1 + np.exp(np.minimum((target_ms - ms) * slope, 50.0)))
    return chance
