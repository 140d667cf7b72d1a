"""What an engine can do and how its latency grows with load, learned from its signals.

Two capacities, because mixed hardware differs in prefill and in decode, and not by the same factor. Each is known from
three sides, the surer one first:

- how its times to first token and between tokens grew with its load, as it was seen: by `routing.curve`, 1 ÷ TTFT and
  1 ÷ TBT fall in a straight line from what they are without load to 0 at the capacity. A least-squares line is fitted
  online, and forgets;
- how long its steps take, as it measured (StepCost), and how many it runs at once;
- its rates. An engine reports what it just did, and an idle one does little: only the best of the recent past counts.

The latter two are the prior of the first. An engine nobody knows anything of is taken for half as good as the worst
that is known: it must show what it can do before it gets more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from routing import sketch
from routing.curve import Curve
from routing.line import NO_POINTS, Line
from routing.schedule import PrefillCost
from wire.messages import EngineSignal, StepCost

HALF_LIFE_MS = 120_000.0
"""What was seen is forgotten this slowly, so that an engine that became slower is noticed"""
LOAD_MEMORY_MS = 10_000.0
"""Load is the rate of endings, over about so long: a signal alone has one or two"""
CAUTION = 0.5
"""An engine nobody has measured is taken to be half as good as the worst that has been"""
PRIOR_WEIGHT = 30.0
"""Signals after which what was seen counts as much as what is expected: 15 seconds of them"""
MOST_CORRECTION = 4.0
"""What was seen can't correct what is expected by more: beyond that the model is wrong, and not a number in it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What requests are like, on average."""

    prompt_tokens: float = 1_000.0
    answer_tokens: float = 250.0
    """both within a factor of two of published chat traces"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What one life of an engine has shown. Rates in tokens a second; None until measured."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    step: StepCost | None = None
    held_tokens: int = 0
    """in its cache when it measured that"""
    slots: int = 1
    load: float = 0.0
    """requests that ended a second, lately"""
    ttft: Line = NO_POINTS
    """load → 1 ÷ TTFT in ms"""
    tbt: Line = NO_POINTS
    """load → 1 ÷ TBT in ms"""
    at_ms: int = 0


UNMEASURED = Profile()


def learn(profile: Profile, signal: EngineSignal) -> Profile:
    """The profile after one more signal. A rate that is no positive number counts as unknown."""
    passed_ms = max(signal.at_ms - profile.at_ms, 0) if profile.at_ms else 0
    fade = 2.0 ** (-passed_ms / HALF_LIFE_MS)
    load = profile.load
    if passed_ms:
        keep = math.exp(-passed_ms / LOAD_MEMORY_MS)
        load = load * keep + (1 - keep) * max(signal.finished, 0) * 1_000 / passed_ms
    ttft_ms, tbt_ms = sketch.mean(signal.ttft), sketch.mean(signal.tbt)
    ttft, tbt = profile.ttft.fade(fade), profile.tbt.fade(fade)
    return Profile(
        prefill_tokens_per_s=_best(profile.prefill_tokens_per_s, fade, signal.prefill_tokens_per_s),
        decode_tokens_per_s=_best(profile.decode_tokens_per_s, fade, signal.decode_tokens_per_s),
        step=signal.step or profile.step,
        held_tokens=max(signal.kv_used_tokens or 0, 0) if signal.step else profile.held_tokens,
        slots=max(signal.slots, 1),
        load=load,
        ttft=ttft.add(load, 1 / ttft_ms) if ttft_ms else ttft,
        tbt=tbt.add(load, 1 / tbt_ms) if tbt_ms else tbt,
        at_ms=max(signal.at_ms, profile.at_ms),
    )


def curves(profiles: Iterable[Profile], mix: Mix) -> list[Curve]:
    """Each engine's latency against its load, under requests like these."""
    made = [_curve(profile, mix) for profile in profiles]
    known = [curve for curve in made if curve is not None]
    worst = Curve(
        base_ms=0.0,
        scale_ms=max((curve.scale_ms for curve in known), default=1_000.0) / CAUTION,
        capacity=min((curve.capacity for curve in known), default=1.0) * CAUTION,
    )
    return [worst if curve is None else curve for curve in made]


def slowed(curve: Curve, factor: float) -> Curve:
    """An engine that is trusted with only this part of its capacity."""
    return replace(curve, capacity=curve.capacity * factor)


def rate(value: float | None) -> float | None:
    """A reported rate, or None where it is no positive number."""
    return value if value is not None and 0 < value < math.inf else None


def _curve(profile: Profile, mix: Mix) -> Curve | None:
    """None for an engine of which nothing is known."""
    expected = _expected(profile, mix)
    if expected is None:
        return None
    ttft_ms, tbt_ms, capacity = expected
    ttft_ms, first = _fitted(profile.ttft, ttft_ms, capacity)
    tbt_ms, second = _fitted(profile.tbt, tbt_ms, capacity)
    scale_ms = ttft_ms + mix.answer_tokens * tbt_ms
    return Curve(base_ms=0.0, scale_ms=scale_ms, capacity=min(first, second))


def _expected(profile: Profile, mix: Mix) -> tuple[float, float, float] | None:
    """TTFT and TBT without load, in ms, and the capacity in requests a second, by what the engine says of itself."""
    answer, slots, step = max(mix.answer_tokens, 1.0), profile.slots, profile.step
    if step is not None:
        cost = PrefillCost(
            fixed_ms=step.prefill_fixed_ms, token_ms=step.prefill_token_ms, square_ms=step.prefill_square_ms
        )
        prompt_ms = cost.all_ms(mix.prompt_tokens, max(step.piece_tokens, 1))
        held_ms = step.decode_token_ms * profile.held_tokens
        alone_ms = max(step.decode_ms - held_ms, step.decode_ms / MOST_CORRECTION)
        full_ms = alone_ms + slots * step.decode_token_ms * (mix.prompt_tokens + answer / 2)
    else:
        prefill, decode = rate(profile.prefill_tokens_per_s), rate(profile.decode_tokens_per_s)
        if decode is None:
            return None
        prompt_ms = 0.0 if prefill is None else mix.prompt_tokens * 1_000 / prefill
        alone_ms = full_ms = slots * 1_000 / decode
    return prompt_ms + alone_ms, alone_ms, 1_000 / (prompt_ms + answer * full_ms / slots)


def _fitted(line: Line, alone_ms: float, capacity: float) -> tuple[float, float]:
    """The time without load and the capacity, by what was seen and what is expected: the latter are two points more."""
    half = PRIOR_WEIGHT / 2
    start, slope = line.add(0.0, 1 / alone_ms, half).add(capacity / 2, 0.5 / alone_ms, half).fit()
    seen_ms = 1 / start if start > 0 else math.inf
    pole = -start / slope if slope < 0 < start else math.inf
    return _near(seen_ms, alone_ms), _near(pole, capacity)


def _near(seen: float, expected: float) -> float:
    return min(max(seen, expected / MOST_CORRECTION), expected * MOST_CORRECTION)


def _best(before: float | None, fade: float, reported: float | None) -> float | None:
    now = rate(reported)
    if before is None or now is None:
        return now if before is None else before * fade
    return max(before * fade, now)
