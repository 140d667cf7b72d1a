"""What a request would lose, and make others lose, at each engine: the expected number of broken promises.

For every engine at once, as arrays over engines. With x prompt tokens to compute, P the time that takes, B the time of
the prompts that wait there, d₀ and d₁ a decode step's time without and with the request:

- the request is late with the chance that age + B + P + decode steps in between exceed the TTFT that is promised;
- it is slow from the start if d₁ exceeds the time between tokens that is promised;
- who decodes there is stalled by B + P instead of B, and then gains on its pace tbt − d₁ a token instead of tbt − d₀.
  Who is behind by y catches up if it has y ÷ (tbt − d) tokens left (`routing.lengths`); who is ahead by y where steps
  are slower than its pace falls behind if it has y ÷ (d − tbt) left. The rise of that chance, over all that are there;
- and the engine's time is worth something to those who come next: a price on P and on d₁.

docs/decisions/marginal-goodput.md compares this with what else could be minimised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routing.lengths import BUCKET_TOKENS
from routing.schedule import Targets

Floats = NDArray[np.float64]

PREFILL_PRICE = 2.0
"""Requests that an engine's time is worth, a TTFT target of it: an engine serves one to a few requests in that time.
From half to twice of it goodput changes by less than 0.005"""
DECODE_PRICE = 0.75
"""Requests that a decode step is worth, a TBT target of it: what slows all that will come. Same plateau"""
TTFT_DOUBT = 0.075
"""Standard error of a predicted TTFT, in targets: the rest of a step, what is sent meanwhile, the cost's fit"""
TBT_DOUBT = 0.04
"""The same of a decode step's time"""
LEAST_MARGIN = 0.02
"""|tbt − d| is taken to be this many targets at least: nearer the chance would jump"""
WAITING_STALL = 0.5
"""Of the work that waits, a waiting request has half before it and half behind it, which will stall it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Engines as they are taken to be now; each array has an entry (`slacks_ms`, `weights`: a row) an engine."""

    backlog_ms: Floats
    """time of the prompts that wait"""
    slot_ms: Floats
    """until one more request gets a slot; 0 where one is free"""
    decode_ms: Floats
    """a decode step with all that run and wait"""
    decode_token_ms: Floats
    fixed_ms: Floats
    token_ms: Floats
    square_ms: Floats
    piece_tokens: Floats
    piece_ms: Floats
    """of a whole piece"""
    waiting: Floats
    """requests that wait"""
    decoding: Floats
    """requests that decode"""
    slacks_ms: Floats
    """ahead of their pace"""
    weights: Floats
    """how many that decode each slack stands for"""


def prefill_ms(state: State, tokens: Floats) -> tuple[Floats, Floats]:
    """Time of a prompt's tokens at each engine, and in how many pieces."""
    whole = np.floor(tokens / state.piece_tokens)
    rest = tokens - whole * state.piece_tokens
    begun = rest > 0
    rest_ms = (state.token_ms + state.square_ms * rest) * rest + state.fixed_ms * begun
    return whole * state.piece_ms + rest_ms, whole + begun


def expected_loss(
    state: State,
    *,
    new_tokens: Floats,
    prompt_tokens: float,
    waited_ms: float | Floats,
    table: Floats,
    targets: Targets,
) -> Floats:
    """The loss at each engine.

    `new_tokens`: of the prompt, that the engine has not in its cache. `waited_ms`: since the request came, and until it
    will be there. `table`: `Lengths.table`.
    """
    prompt_ms, pieces = prefill_ms(state, new_tokens)
    after_ms = state.decode_ms + state.decode_token_ms * prompt_tokens
    between_ms = (pieces + 0.5) * state.decode_ms * (state.decoding > 0)
    ttft_ms = waited_ms + state.slot_ms + state.backlog_ms + prompt_ms + between_ms
    loss = _exceeds(ttft_ms, targets.ttft_ms, TTFT_DOUBT) + _exceeds(after_ms, targets.tbt_ms, TBT_DOUBT)
    loss += prompt_ms * (PREFILL_PRICE / targets.ttft_ms) + after_ms * (DECODE_PRICE / targets.tbt_ms)
    behind_ms = state.backlog_ms[:, None] - state.slacks_ms
    waiting_ms = WAITING_STALL * state.backlog_ms
    for sign, stall_ms, step_ms in ((-1.0, 0.0, state.decode_ms), (1.0, prompt_ms, after_ms)):
        margin_ms = targets.tbt_ms - step_ms
        slow = margin_ms < 0
        scale = 1 / (BUCKET_TOKENS * _at_least(margin_ms, LEAST_MARGIN * targets.tbt_ms))
        queued = _share(table, (waiting_ms + stall_ms) * scale)
        stalled = behind_ms + stall_ms[:, None] if sign > 0 else behind_ms  # type: ignore[index]
        shares = _share(table, stalled * scale[:, None])
        missed = (shares * state.weights).sum(axis=1) + queued * state.waiting
        if slow.any():
            missed = np.where(slow, state.decoding + state.waiting - missed, missed)
        loss += sign * missed
    return loss


def _share(table: Floats, buckets: Floats) -> Floats:
    """The share of answers that have fewer buckets of tokens left; none for a negative number."""
    index = np.clip(buckets + 0.5, 0.0, len(table) - 1.0).astype(np.intp)
    return table[index]


def _exceeds(ms: Floats, target_ms: float, doubt: float) -> Floats:
    """The chance that a predicted time exceeds its target: logistic, as the normal distribution nearly is."""
    return 1 / (1 + np.exp(np.clip((target_ms - ms) * (1.7 / (doubt * target_ms)), -50.0, 50.0)))


def _at_least(value: Floats, least: float) -> Floats:
    """The value, no nearer to 0 than `least`, on its side."""
    return np.where(value < 0, np.minimum(value, -least), np.maximum(value, least))
