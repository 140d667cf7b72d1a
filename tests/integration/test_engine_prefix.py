"""The prefix cache, and batch that makes room, with numbers: neither changes a token or a logprob of any answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_world import LIMITS, Told, Transcript, make_sequence, restored_at, run, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.engine import measure_prefix
from workers.engine.link import Config
from workers.engine.make import make_engine, make_vocabulary
from workers.engine.protocol import Engine, Key, Prefixes, Sequence
from workers.engine.runner import Runner, load_runner
from workers.engine.scheduler import Work
from workers.engine.simulated import Pace, SimulatedEngine
from workers.engine.simulated_vocabulary import SimulatedVocabulary
from workers.engine.tokenizer import Tokenizer
from workers.engine.torch_engine import TorchEngine

pytestmark = pytest.mark.timeout(600)
WITH_CACHE = replace(LIMITS, prefix_blocks=8, step_tokens=48)
WITHOUT = replace(LIMITS, step_tokens=48)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), vocab_size=265)  # no id but the tokenizer's


def runner_of(model_dir: Path, blocks: int = 8) -> Runner:
    runner = load_runner(model_dir, slots=LIMITS.slots, context_tokens=LIMITS.context_tokens, threads=1)
    runner.keep_blocks(blocks, LIMITS.chunk_tokens)
    return runner


@pytest.fixture(params=["simulated", "torch"])
def make(request: pytest.FixtureRequest, model_dir: Path) -> Callable[..., Engine]:
    """A fresh engine, with a prefix cache or without."""
    tokenizer = Tokenizer.load(model_dir)

    def made(limits: object = WITH_CACHE) -> Engine:
        if request.param == "simulated":
            return SimulatedEngine(limits, Pace(ttft_ms=0, tbt_ms=0))  # type: ignore[arg-type]
        return TorchEngine(runner_of(model_dir), tokenizer, limits)  # type: ignore[arg-type]

    return made


def asked(ref: int, prompt: tuple[int, ...], **changes: object) -> Sequence:
    return make_sequence(ref, prompt, **{"max_tokens": 6, "logprobs": 2, "ignore_eos": True, **changes})  # type: ignore[arg-type]


def cached_of(engine: Engine, sequence: Sequence) -> tuple[int, Told]:
    transcript, cached = Transcript(), 0
    engine.add(sequence)
    while engine.busy():
        emissions = engine.step()
        transcript.take(emissions)
        cached += sum(emission.cached_tokens or 0 for emission in emissions)
    return cached, transcript.choices[sequence.key.ref, 0]


SHARED = tuple(3 + at % 250 for at in range(48))


def test_a_hit_changes_no_token_and_no_logprob(make: Callable[..., Engine]) -> None:
    engine = make()
    for ref, (prompt, cached) in enumerate(
        [
            (SHARED, 0),
            (SHARED, 32),  # the last token is always computed
            ((*SHARED, 5), 48),
            ((*SHARED[:40], 5, 6, 7), 32),
            ((*SHARED[:16], *range(60, 90)), 16),
            ((9, *SHARED), 0),
        ]
    ):
        sequence = asked(ref, prompt)
        assert cached_of(engine, sequence) == (cached, run(make(WITHOUT), sequence)[ref, 0])


def test_tenants_share_no_hit(make: Callable[..., Engine]) -> None:
    engine = make()
    counts = [cached_of(engine, asked(ref, SHARED, tenant=tenant))[0] for ref, tenant in enumerate(("a", "b", "a", ""))]
    assert counts == [0, 0, 32, 0]


def test_what_was_generated_is_not_kept(make: Callable[..., Engine]) -> None:
    engine = make()
    first = cached_of(engine, asked(1, SHARED[:20], max_tokens=40))[1]
    conversation = (*SHARED[:20], *first.ids)
    sequence = asked(2, (*conversation, 7))
    assert cached_of(engine, sequence) == (16, run(make(WITHOUT), sequence)[2, 0])
    assert cached_of(engine, asked(3, (*conversation, 8)))[0] == 48


def test_a_resumed_answer_is_the_same_whatever_the_cache_has(make: Callable[..., Engine]) -> None:
    sequence = asked(1, SHARED, max_tokens=8)
    whole = run(make(WITHOUT), sequence)[1, 0]
    engine = make()
    for cut in range(0, 8, 3):
        told = run(engine, restored_at(sequence, whole, cut))[1, 0]
        assert whole.ids[:cut] + told.ids == whole.ids
        assert whole.logprobs[cut:] == told.logprobs


def test_choices_of_a_hit_are_those_of_a_miss(make: Callable[..., Engine]) -> None:
    engine = make()
    cached_of(engine, asked(1, SHARED))
    sequence = asked(2, (*SHARED, 4), n=3)
    assert run(engine, sequence) == run(make(WITHOUT), sequence)


def test_an_engine_tells_what_it_keeps(make: Callable[..., Engine]) -> None:
    engine = make(replace(WITH_CACHE, prefix_blocks=2))
    cached_of(engine, asked(1, SHARED, links=((11, 16), (12, 33))))
    assert [engine.prefixes(), engine.prefixes()] == [Prefixes((11,), ()), Prefixes()]
    cached_of(engine, asked(2, tuple(range(100, 140)), links=((13, 3),)))
    assert engine.prefixes() == Prefixes((13,), (11,))
    assert make(WITHOUT).prefixes() is None


def test_batch_that_makes_room_says_what_it_says_alone(make: Callable[..., Engine]) -> None:
    batch = [asked(ref, SHARED[ref : ref + 30], max_tokens=20, batch=True, n=1 + ref % 2) for ref in range(5)]
    engine, transcript = make(), Transcript()
    for sequence in batch:
        engine.add(sequence)
    for wave in range(6):
        for _ in range(4):
            transcript.take(engine.step())
        engine.add(asked(10 + wave, SHARED[wave : wave + 20], max_tokens=5, n=1 + wave % 3))
    while engine.busy():
        transcript.take(engine.step())
    for sequence in batch:
        alone = run(make(WITHOUT), sequence)
        assert {at: told for at, told in transcript.choices.items() if at[0] == sequence.key.ref} == alone
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 0)


def test_a_thousand_cancels_leak_nothing(make: Callable[..., Engine]) -> None:
    engine = make()
    for number in range(1_000):
        prompt = SHARED[number % 7 : 20 + number % 23]
        engine.add(asked(number, prompt, n=1 + number % 3, batch=number % 2 == 0, tenant=str(number % 2)))
        if number % 4 == 3:
            engine.step()
        if number >= 5:
            engine.cancel(Key(0, 1, number - 5))  # type: ignore[arg-type]
    for number in range(995, 1_000):
        engine.cancel(Key(0, 1, number))  # type: ignore[arg-type]
    assert not engine.busy()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens, load.waiting_tokens) == (0, 0, 0, 0)
    sequence = asked(2_000, SHARED, n=LIMITS.slots)
    assert run(engine, sequence) == run(make(WITHOUT), sequence)


ASKED = st.lists(
    st.tuples(
        st.integers(0, 2),  # which beginning
        st.integers(1, 60),  # prompt tokens
        st.integers(1, 8),  # answer tokens
        st.integers(1, 2),  # choices
        st.booleans(),  # batch
        st.integers(0, 3),  # steps before the next
    ),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ASKED, st.integers(1, 8))
def test_whatever_comes_an_answer_is_that_of_a_run_alone(
    model_dir: Path, plan: list[tuple[int, int, int, int, bool, int]], blocks: int
) -> None:
    tokenizer, transcript = Tokenizer.load(model_dir), Transcript()
    engine = TorchEngine(runner_of(model_dir), tokenizer, replace(WITH_CACHE, prefix_blocks=blocks))
    plain = TorchEngine(runner_of(model_dir), tokenizer, WITHOUT)
    sequences = []
    for ref, (begin, length, answer, n, batch, steps) in enumerate(plan):
        prompt = tuple(3 + (begin + at * (1 if at < 32 else ref)) % 250 for at in range(length))
        sequences.append(asked(ref, prompt, max_tokens=answer, n=n, batch=batch))
        engine.add(sequences[-1])
        for _ in range(steps):
            transcript.take(engine.step())
    while engine.busy():
        transcript.take(engine.step())
    for sequence in sequences:
        alone = run(plain, sequence)
        assert {at: told for at, told in transcript.choices.items() if at[0] == sequence.key.ref} == alone


def test_a_block_has_the_bits_that_computing_gives(model_dir: Path) -> None:
    """Pieces together in one step, one a step, and copied: the same keys and values, the same logits."""
    prompt = tuple(3 + at * 7 % 250 for at in range(40))

    def piece(slot: int, start: int, end: int, **more: object) -> Work:
        return Work(slot=slot, start=start, ids=prompt[start:end], stepwise=False, **more)  # type: ignore[arg-type]

    runner, draws = runner_of(model_dir), {"draws": (object(),)}
    apart = [runner.run([piece(0, 0, 16)]), runner.run([piece(0, 16, 32)]), runner.run([piece(0, 32, 40, **draws)])]
    together = runner.run([piece(1, 0, 16, save=3), piece(1, 16, 32, save=5), piece(1, 32, 40, **draws)])
    copied = runner.run([piece(2, 32, 40, loads=(3, 5), **draws)])
    half = runner.run([piece(3, 16, 32, loads=(3,)), piece(3, 32, 40, **draws)])
    assert torch.equal(runner._kv[:, :, 0, :, :32], runner._kv[:, :, 1, :, :32])
    assert torch.equal(runner._kv[:, :, 0, :, :32], runner._kv[:, :, 2, :, :32])
    for logits in (together, copied, half):
        assert np.array_equal(logits, apart[2])


def test_what_a_hit_saves_can_be_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MILLSTREAM_ENGINE_KIND", "simulated")
    monkeypatch.setenv("MILLSTREAM_SIMULATED_TTFT_MS", "1")
    monkeypatch.setenv("MILLSTREAM_SIMULATED_TBT_MS", "0")
    assert measure_prefix.main() == 0
    assert "with 1472 of them cached" in capsys.readouterr().out
    monkeypatch.setenv("MILLSTREAM_ENGINE_KIND", "steam")
    assert measure_prefix.main() == 1


def test_the_simulated_engine_keeps_prompts_too() -> None:
    vocabulary = SimulatedVocabulary()
    engine = SimulatedEngine(WITH_CACHE, Pace(ttft_ms=0, tbt_ms=0))
    prompt = vocabulary.encode_text("the mill by the river " * 10)
    assert [cached_of(engine, asked(ref, prompt))[0] for ref in (1, 2)] == [0, (len(prompt) - 1) // 16 * 16]


LONG = tuple(3 + at * 7 % 250 for at in range(768))


def paged(model_dir: Path, prefix_tokens: int) -> Engine:
    """As a worker with a GPU makes it, but for the kernels."""
    config = Config(
        kind="torch",
        device="reference",
        numerics="bf16",
        slots=2,
        threads=1,
        context_tokens=1_024,
        prefix_tokens=prefix_tokens,
        model_dir=str(model_dir),
        simulated_ttft_ms=0,
        simulated_tbt_ms=0,
        log_level="INFO",
    )
    return make_engine(config, make_vocabulary(config))


def test_pages_that_the_cache_shares_change_no_token_and_no_logprob(tmp_path: Path) -> None:
    model_dir = write_model(tmp_path, vocab_size=265, max_position_embeddings=1_024)
    engine, without = paged(model_dir, 3 * 256), paged(model_dir, 0)
    for ref, (prompt, cached) in enumerate(
        [
            (LONG, 0),
            (LONG, 512),  # the last token is always computed
            ((*LONG, 5), 768),
            ((*LONG[:300], 5, 6, 7), 256),
            ((9, *LONG), 0),  # takes the places of all others
            (LONG, 0),
            (LONG, 512),
        ]
    ):
        sequence = asked(ref, prompt)
        assert cached_of(engine, sequence) == (cached, run(without, sequence)[ref, 0])
