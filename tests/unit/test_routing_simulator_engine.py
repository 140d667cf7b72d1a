"""A simulated engine: when tokens come, what is found in its cache, and who gives way when it is full."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.simulator.engine import SLOTS, Engine, first_come
from routing.simulator.sequence import UNKNOWN
from routing.simulator.timing import COLD, Timing
from routing.simulator.trace import Arrival

numbers = count()


def arrival(prompt: int, output: int, at_ms: float = 0.0, first: int | None = None) -> Arrival:
    """A prompt like no other, unless `first` says with which number its pieces begin."""
    number = next(numbers)
    start = number * 1000 if first is None else first
    pieces = tuple(range(start, start - (-prompt // 512)))
    return Arrival(number=number, at_ms=at_ms, prompt_tokens=prompt, output_tokens=output, prefix=pieces)


def after(*arrivals: Arrival, timing: Timing = COLD) -> Engine:
    """An engine that has served them."""
    engine = Engine(0, timing)
    for one in arrivals:
        engine.advance(one.at_ms)
        engine.add(one, one.at_ms)
    engine.advance(math.inf)
    return engine


def test_a_request_alone_takes_its_prefill_and_then_its_steps() -> None:
    engine = after(arrival(4834, 173))
    (done,) = engine.done
    assert done.first_token_ms == pytest.approx(99.7359, abs=1e-3)  # no decode time in that step: nothing else decodes
    assert done.finished_ms == pytest.approx(99.7359 + COLD.span_ms(4_835, 1, 172), abs=1e-3)
    assert engine.kv_tokens == engine.in_flight == 0
    assert engine.cache.room == engine.cache.blocks


def test_a_request_of_one_token_ends_with_its_first() -> None:
    (done,) = after(arrival(100, 1)).done
    assert done.first_token_ms == done.finished_ms == pytest.approx(COLD.prefill_ms(100))


def test_prompts_that_come_together_share_a_step() -> None:
    first, second = after(arrival(1000, 1), arrival(2000, 1)).done
    assert first.finished_ms == second.finished_ms == pytest.approx(COLD.prefill_ms(3000))


def test_a_long_prompt_is_computed_in_chunks_beside_what_decodes() -> None:
    decoding, long = after(arrival(640, 2000), arrival(20_000, 1, at_ms=1_000.0)).done[::-1]
    # a step's 8,192 tokens hold the decoding sequence's one: 8,191 + 8,191 + 3,618
    tokens_before = next(n for n in range(2000) if COLD.prefill_ms(640) + COLD.span_ms(641, 1, n) >= 1_000)
    began = COLD.prefill_ms(640) + COLD.span_ms(641, 1, tokens_before)
    chunks = sum(map(COLD.prefill_ms, (8_191, 8_191, 3_618))) + COLD.span_ms(641 + tokens_before, 1, 3)
    assert long.first_token_ms == pytest.approx(began + chunks)
    assert decoding.finished_ms > long.finished_ms


def test_the_beginning_of_a_prompt_is_computed_once() -> None:
    shared = [arrival(5_120, 1, first=7), arrival(5_120, 1, at_ms=5_000.0, first=7)]
    first, second = after(*shared).done
    assert (first.cached_tokens, second.cached_tokens) == (0, 5_056)  # at least one block is computed anyway
    assert second.first_token_ms - 5_000 == pytest.approx(COLD.prefill_ms(64))


def test_an_engine_runs_so_many_at_once() -> None:
    engine = Engine(0, COLD)
    for _ in range(SLOTS + 1):
        engine.add(arrival(10, 50), 0.0)
    engine.advance(200.0)
    assert (len(engine.running), len(engine.queue)) == (SLOTS, 1)
    engine.advance(math.inf)
    last = max(engine.done, key=lambda one: one.first_token_ms)
    assert last.first_token_ms > max(one.finished_ms for one in engine.done if one is not last)


def test_a_full_cache_makes_prompts_wait() -> None:
    small = replace(COLD, kv_tokens=64 * 64)
    first, second = after(arrival(3_000, 100), arrival(2_000, 5), timing=small).done
    assert second.started_ms >= first.finished_ms


def test_who_began_last_gives_way_when_tokens_need_room() -> None:
    small = replace(COLD, kv_tokens=64 * 64)
    engine = after(arrival(1_900, 800), arrival(1_900, 60, at_ms=50.0), timing=small)
    assert sorted(one.arrival.output_tokens for one in engine.done) == [60, 800]
    assert engine.cache.room == 64
    crowded = after(arrival(1_900, 800), arrival(1_900, 700, at_ms=50.0), timing=small)
    early, late = crowded.done
    assert early.arrival.output_tokens == 800
    assert late.generated_tokens > 0  # it had those, and they were computed again
    assert late.first_token_ms < early.finished_ms <= late.started_ms
    assert crowded.cache.room == 64


def test_a_chunk_too_makes_who_decodes_give_way() -> None:
    small = replace(COLD, kv_tokens=300 * 64)
    engine = Engine(0, small, lambda engine: (64, engine.backlog()))
    engine.add(arrival(640, 1_000), 0.0)
    engine.add(arrival(640, 1_000), 0.0)
    engine.advance(400.0)
    engine.add(arrival(17_000, 1), 400.0)
    engine.advance(math.inf)
    assert len(engine.done) == 3
    assert engine.cache.room == 300


def test_the_last_that_decodes_gives_way_to_a_prompt_that_has_begun() -> None:
    small = replace(COLD, kv_tokens=20 * 64)
    engine = Engine(0, small, lambda engine: (0 if engine.partial else 640, engine.backlog()))
    engine.add(arrival(64, 900), 0.0)
    engine.advance(20.0)
    engine.add(
        arrival(1_000, 1), 20.0
    )  # 10 of its 16 blocks are computed, and then nothing for as long as there is room
    engine.advance(math.inf)
    short, long = engine.done
    assert (short.arrival.output_tokens, long.arrival.output_tokens) == (1, 900)
    assert long.generated_tokens > 300
    assert engine.cache.room == 20


def test_what_could_never_run_is_refused() -> None:
    with pytest.raises(ValueError, match="fit"):
        Engine(0, COLD).add(arrival(COLD.kv_tokens, 1), 0.0)


def test_a_rule_that_says_nothing_only_decodes_as_long_as_there_is_something_to_decode() -> None:
    engine = Engine(0, COLD, lambda engine: (0, engine.backlog()))
    engine.add(arrival(100, 50), 0.0)
    engine.advance(100.0)
    engine.add(arrival(100, 1), 100.0)
    engine.advance(math.inf)
    long, short = sorted(engine.done, key=lambda one: -one.arrival.output_tokens)
    assert short.started_ms >= long.finished_ms


def test_what_is_read_in_the_middle_of_a_span_is_up_to_date() -> None:
    engine = Engine(0, COLD)
    running = engine.add(arrival(640, 1_000), 0.0)
    engine.advance(1_000.0)
    engine.sync(1_000.0)
    tokens = next(n for n in count() if COLD.prefill_ms(640) + COLD.span_ms(641, 1, n + 1) > 1_000)
    assert engine.kv_tokens == 641 + tokens
    assert engine.steps - running.since == 1 + tokens
    engine.sync(1_000.0)
    assert engine.kv_tokens == 641 + tokens
    assert engine.slacks_ms(1_000.0) == [25.0 * (1 + tokens) - 1_000.0 + running.first_token_ms]
    assert (engine.used_blocks, engine.backlog_tokens, engine.in_flight) == (10 + 1 + (1 + tokens) // 64 + 1, 0, 1)


def test_an_engine_that_becomes_slower_is_so_from_its_next_step() -> None:
    engine = Engine(0, COLD)
    engine.add(arrival(640, 200), 0.0)
    engine.advance(500.0)
    engine.change(0.1, 500.0)
    engine.change(1.0, 500.0)
    engine.advance(math.inf)
    assert engine.done[0].finished_ms > 7_000  # about 120 tokens were left, 58 ms each


def test_a_dead_engine_gives_back_what_it_had() -> None:
    engine = Engine(0, COLD)
    engine.add(arrival(100, 500), 0.0)
    engine.advance(100.0)
    engine.add(arrival(20_000, 5), 100.0)
    engine.advance(150.0)
    engine.add(arrival(100, 5), 150.0)
    assert engine.backlog_tokens == 20_000 - 8_191 + 100
    lost = engine.halt()
    assert sorted(one.first_token_ms == UNKNOWN for one in lost) == [False, True, True]
    assert (engine.in_flight, engine.used_blocks, engine.kv_tokens) == (0, 0, 0)
    engine.advance(1_000.0)
    again = engine.add(arrival(100, 5), 1_000.0)
    engine.advance(math.inf)
    assert again.finished_ms > 1_000


def test_what_requests_waited_is_kept_by_how_many_were_there() -> None:
    engine = Engine(0, COLD)
    assert engine.ttft_ms == 0
    engine.add(arrival(1_000, 1), 0.0)
    engine.advance(1_000.0)
    assert engine.ttft_ms == pytest.approx(COLD.prefill_ms(1_000))


requests = st.lists(
    st.tuples(st.integers(1, 3_000), st.integers(1, 300), st.floats(0, 400), st.integers(0, 3)), min_size=1, max_size=30
)


@settings(derandomize=True, max_examples=300)
@given(requests, st.sampled_from([first_come, lambda engine: (500, engine.backlog()[::-1])]))
def test_every_request_gets_its_tokens_and_every_block_comes_back(
    requests: list[tuple[int, int, float, int]], rule: object
) -> None:
    engine = Engine(0, replace(COLD, kv_tokens=80 * 64), rule)  # type: ignore[arg-type]
    at_ms = 0.0
    for prompt, output, pause_ms, family in requests:
        at_ms += pause_ms
        engine.advance(at_ms)
        engine.add(arrival(prompt, output, at_ms, first=family * 100), at_ms)
    engine.advance(math.inf)
    assert len(engine.done) == len(requests)
    assert engine.cache.room == 80
    assert engine.kv_tokens == engine.backlog_tokens == 0
    for one in engine.done:
        assert at_ms * 0 <= one.queued_ms <= one.started_ms or one.generated_tokens
        assert one.queued_ms < one.first_token_ms <= one.finished_ms
