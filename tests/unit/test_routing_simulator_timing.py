"""How long simulated steps take, and the closed form of many of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.simulator.timing import COLD, Timing

H100 = Timing(prefill_speed=1.8, decode_speed=1.5)


def test_the_polynomials_are_the_mockers() -> None:
    # 4.209989e-7 · 4834² + 0.01518344 · 4834 + 16.50142 = 9.838 + 73.397 + 16.501: what ai-dynamo 1.6.1 answers
    assert COLD.prefill_ms(4834) == pytest.approx(99.735884, abs=1e-4)
    # p = 4835 / 1,048,576 = 0.00461: 5.74 + 54.01 · p − 25.74 · p²
    assert COLD.decode_ms(4835) == pytest.approx(5.988494, abs=1e-5)
    assert COLD.prefill_ms(0) == 0


def test_a_long_prompt_takes_chunks() -> None:
    assert COLD.chunked_ms(20_000) == pytest.approx(2 * COLD.prefill_ms(8_192) + COLD.prefill_ms(3_616))


def test_a_full_cache_is_as_slow_as_it_gets() -> None:
    assert COLD.decode_ms(2 * COLD.kv_tokens) == COLD.decode_ms(COLD.kv_tokens) == pytest.approx(34.01)


def test_faster_hardware_divides_times() -> None:
    assert H100.prefill_ms(8_000) * 1.8 == pytest.approx(COLD.prefill_ms(8_000))
    assert COLD.faster(1.5).decode_ms(9) * 1.5 == pytest.approx(COLD.decode_ms(9))


spans = {
    "kv_tokens": st.integers(1, 1_200_000),
    "sequences": st.integers(1, 256),
    "steps": st.integers(1, 300),
}


@given(**spans)
def test_a_span_is_the_sum_of_its_steps(kv_tokens: int, sequences: int, steps: int) -> None:
    one_by_one = sum(COLD.decode_ms(kv_tokens + step * sequences) for step in range(steps))
    # the step that reaches the end of the cache counts as full: 256 of a million tokens early at most
    assert COLD.span_ms(kv_tokens, sequences, steps) == pytest.approx(one_by_one, rel=1e-4)


@given(**spans, share=st.floats(0, 1.2))
def test_the_steps_within_a_time_are_those_that_have_ended(
    kv_tokens: int, sequences: int, steps: int, share: float
) -> None:
    within_ms = share * H100.span_ms(kv_tokens, sequences, steps)
    ended = H100.steps_within(kv_tokens, sequences, steps, within_ms)
    assert 0 <= ended <= steps
    assert ended == 0 or H100.span_ms(kv_tokens, sequences, ended) <= within_ms * (1 + 1e-12)
    assert ended == steps or H100.span_ms(kv_tokens, sequences, ended + 1) > within_ms
