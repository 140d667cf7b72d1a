"""When pieces of prompts are computed: by the slack of what decodes, once steps have been measured."""

from __future__ import annotations

import pytest

from routing.schedule import Targets
from wire.messages import Ref
from workers.engine.pace import ENOUGH, Pace, Prompt, StepTimes
from workers.engine.protocol import Key

STEP_TOKENS = 256
TARGETS = Targets(ttft_ms=2_000, tbt_ms=25)


def key(ref: int) -> Key:
    return Key(0, 1, Ref(ref))


def prompt(ref: int, tokens: int = 200, *, batch: bool = False) -> Prompt:
    return Prompt(key=key(ref), tokens=tokens, batch=batch)


def measured(pace: Pace) -> Pace:
    """Steps take 10 ms and 0.001 a token held; a prompt 5 ms and 0.1 a token."""
    for n in range(20):
        held = n * 100
        pace.times.add(prompt_tokens=0, decodes=True, held_tokens=held, ms=10 + 0.001 * held)
    for n in range(1, 20):
        held = n * 100
        pace.times.add(prompt_tokens=10 * n, decodes=True, held_tokens=held, ms=10 + 0.001 * held + 5 + n)
    return pace


def test_steps_are_a_line_over_what_they_compute() -> None:
    step = measured(Pace(STEP_TOKENS)).times.cost(5_000, STEP_TOKENS)
    assert step is not None
    assert (step.decode_ms, step.decode_token_ms) == pytest.approx((15, 0.001))
    assert (step.prefill_fixed_ms, step.prefill_token_ms) == pytest.approx((5, 0.1))


def test_nothing_is_believed_before_enough_steps() -> None:
    times = StepTimes()
    times.add(prompt_tokens=100, decodes=True, held_tokens=0, ms=30)  # how long the decoding took isn't known
    for _ in range(round(ENOUGH) + 1):
        assert times.decode_ms(0) is None
        times.add(prompt_tokens=0, decodes=True, held_tokens=100, ms=10)
    assert times.decode_ms(100) == pytest.approx(10)
    assert times.cost(0, STEP_TOKENS) is None
    for _ in range(round(ENOUGH) + 1):
        times.add(prompt_tokens=100, decodes=False, held_tokens=0, ms=30)
    step = times.cost(100, STEP_TOKENS)
    assert step is not None
    assert step.prefill_token_ms == pytest.approx(0.3), "one length only: as if it began at nothing"


def test_times_never_fall() -> None:
    times = StepTimes()
    for n in range(30):
        times.add(prompt_tokens=0, decodes=True, held_tokens=n, ms=40 - n)
        times.add(prompt_tokens=100 + n, decodes=False, held_tokens=0, ms=0.01 * n**2)
    step = times.cost(1_000_000, STEP_TOKENS)
    assert step is not None
    assert step.decode_token_ms == 0
    assert step.decode_ms > 0
    assert step.prefill_fixed_ms == 0


def test_an_empty_caches_steps_are_level() -> None:
    times = StepTimes()
    for _ in range(20):
        times.add(prompt_tokens=0, decodes=True, held_tokens=0, ms=12)
    assert times.decode_ms(0) == pytest.approx(12)


def test_before_times_are_known_a_step_takes_what_fits() -> None:
    assert Pace(STEP_TOKENS).next_prompts([prompt(2), prompt(1)], 0, 0) == (STEP_TOKENS, [key(2), key(1)])


def test_a_prompt_waits_for_the_slack_of_what_decodes() -> None:
    pace = measured(Pace(STEP_TOKENS, TARGETS))
    pace.came(key(9), 0)
    pace.drew(key(1), 0, 0)
    # 25 − 10 − 5 ms leave room for 100 tokens: too few of 256, so none
    assert pace.next_prompts([prompt(9, 1_000)], 0, 0)[0] == 0
    for n in range(1, 6):
        pace.drew(key(1), 0, 10 * n)
    assert pace.slacks_ms(50) == [75]
    assert pace.next_prompts([prompt(9, 1_000)], 0, 50)[0] == STEP_TOKENS


def test_a_prompt_that_presses_is_computed_at_once() -> None:
    pace = measured(Pace(STEP_TOKENS, TARGETS))
    pace.came(key(9), 0)
    pace.drew(key(1), 0, 1_700)
    assert pace.next_prompts([prompt(9, 1_000)], 0, 1_700)[0] == STEP_TOKENS


def test_the_longest_of_a_burst_goes_first_and_batch_last() -> None:
    pace = measured(Pace(STEP_TOKENS, TARGETS))
    for ref in (1, 2, 3):
        pace.came(key(ref), 0)
    prompts = [prompt(1, 900, batch=True), prompt(2, 100), prompt(3, 800)]
    assert pace.next_prompts(prompts, 0, 0) == (STEP_TOKENS, [key(3), key(2), key(1)])


def test_what_is_gone_is_forgotten() -> None:
    pace = Pace(STEP_TOKENS, TARGETS)
    for ref in (1, 2, 3):
        pace.came(key(ref), 0)
        pace.drew(key(ref), 0, 0)
    pace.keep([(key(1), 0)], [key(2)])
    assert len(pace.slacks_ms(0)) == 1
    assert set(pace._came_ms) == {key(1), key(2)}
