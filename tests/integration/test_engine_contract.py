"""What every engine does, whatever is inside: the same tests on the simulated one and on torch with a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from engine_world import LIMITS, Told, make_sequence, restored_at, run, write_model

from workers.engine.gpu.engine import load_engine as load_paged
from workers.engine.protocol import Engine, Key, Restored, Sequence
from workers.engine.runner import load_runner
from workers.engine.simulated import Pace, SimulatedEngine
from workers.engine.simulated_vocabulary import SimulatedVocabulary
from workers.engine.tokenizer import Tokenizer
from workers.engine.torch_engine import TorchEngine
from workers.engine.vocabulary import Vocabulary

SLOTS = 4
ONE = (1, 0)
"""request 1, choice 0"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(
    params=[
        "simulated",
        "torch",
        "reference",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    """An engine; the last two are the GPU's, in plain torch on the CPU and with its kernels."""
    return str(request.param)


@pytest.fixture
def vocabulary(kind: str, model_dir: Path) -> Vocabulary:
    return SimulatedVocabulary() if kind == "simulated" else Tokenizer.load(model_dir)


@pytest.fixture
def make(kind: str, vocabulary: Vocabulary, model_dir: Path) -> Callable[[], Engine]:
    """A fresh engine, as after a restart."""

    def made() -> Engine:
        if kind == "simulated":
            return SimulatedEngine(LIMITS, Pace(ttft_ms=0, tbt_ms=0))
        if kind != "torch":
            return load_paged(model_dir, vocabulary, LIMITS, device=kind, numerics="bf16", threads=1)
        runner = load_runner(model_dir, slots=LIMITS.slots, context_tokens=LIMITS.context_tokens, threads=1)
        return TorchEngine(runner, vocabulary, LIMITS)

    return made


@pytest.fixture
def engine(make: Callable[[], Engine]) -> Engine:
    return make()


def prompts(count: int) -> list[tuple[int, ...]]:
    """Of lengths from 1 to 40, so that they end within and at the borders of pieces."""
    return [tuple(3 + (7 * index + at) % 250 for at in range(1 + index * 13 % 40)) for index in range(count)]


def test_one_token_is_one_token_and_a_length(engine: Engine) -> None:
    told = run(engine, make_sequence(1, max_tokens=1, ignore_eos=True))[ONE]
    assert (len(told.ids), told.end) == (1, "length")


def test_it_is_idle_before_and_after(engine: Engine) -> None:
    assert not engine.busy()
    assert list(engine.step()) == []
    run(engine, make_sequence(1))
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens, load.slots) == (0, 0, 0, SLOTS)


def test_the_fingerprint_stays(make: Callable[[], Engine]) -> None:
    assert make().fingerprint == make().fingerprint != ""


def test_choices_differ_and_are_those_of_a_run_alone(make: Callable[[], Engine]) -> None:
    sequence = make_sequence(1, range(3, 30), max_tokens=12, n=3)
    told = run(make(), sequence)
    assert [choice for _, choice in sorted(told)] == [0, 1, 2]
    assert len({tuple(choice.ids) for choice in told.values()}) == 3
    assert run(make(), msgspec.structs.replace(sequence, n=1))[ONE] == told[ONE]


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(make: Callable[[], Engine]) -> None:
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1]
    answers = {}
    for seed in seeds:
        first = run(make(), make_sequence(1, max_tokens=20, seed=seed))[ONE]
        assert run(make(), make_sequence(1, max_tokens=20, seed=seed))[ONE] == first
        answers[seed] = tuple(first.ids)
    assert len(set(answers.values())) == len(seeds)


def test_a_stop_string_ends_the_text_before_it(make: Callable[[], Engine], vocabulary: Vocabulary) -> None:
    sequence = make_sequence(1, max_tokens=30, ignore_eos=True)
    whole = run(make(), sequence)[ONE]
    assert whole.text == vocabulary.render_text(whole.ids, (), "length")
    stop = whole.text[8:11]
    at = whole.text.index(stop)
    told = run(make(), msgspec.structs.replace(sequence, stop=("never in there", stop)))[ONE]
    assert told.text == whole.text[:at]
    assert told.end == "stop"
    assert told.ids == whole.ids[: len(told.ids)]
    assert vocabulary.render_text(told.ids, (stop,), "stop") == told.text


def test_an_ending_token_is_not_among_the_tokens(make: Callable[[], Engine], vocabulary: Vocabulary) -> None:
    ends = 0
    for ref in range(16):
        sequence = make_sequence(ref, max_tokens=60, prompt=(3, 4), logit_bias={"2": 4.0})
        told = run(make(), sequence)[ref, 0]
        assert not vocabulary.eos_ids & set(told.ids)
        ends += told.end == "stop" and len(told.ids) < 60
        on = run(make(), msgspec.structs.replace(sequence, ignore_eos=True))[ref, 0]
        assert (len(on.ids), on.end) == (60, "length")
        later = run(make(), msgspec.structs.replace(sequence, min_tokens=min(60, len(told.ids) + 2)))[ref, 0]
        assert len(later.ids) >= min(60, len(told.ids) + 2)
    assert ends


def test_logprobs_come_one_a_token(make: Callable[[], Engine]) -> None:
    told = run(make(), make_sequence(1, max_tokens=6, logprobs=3, ignore_eos=True))[ONE]
    assert len(told.logprobs) == 6
    assert all(len(entry.top) == 3 for entry in told.logprobs)  # type: ignore[attr-defined]
    assert run(make(), make_sequence(1, max_tokens=6, ignore_eos=True))[ONE].logprobs == []
    assert run(make(), make_sequence(1, max_tokens=6, ignore_eos=True))[ONE].ids == told.ids


def test_a_batch_of_mixed_lengths_equals_each_alone(make: Callable[[], Engine]) -> None:
    sequences = [
        make_sequence(ref, prompt, max_tokens=5 + ref * 7 % 31, temperature=0.7 * (ref % 3), batch=ref % 4 == 0)
        for ref, prompt in enumerate(prompts(14))
    ]
    together = run(make(), *sequences)
    for sequence in sequences:
        at = (sequence.key.ref, 0)
        assert run(make(), sequence)[at] == together[at]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", [(), ("\n",)])
def test_a_restored_choice_goes_on_identically_from_every_cut(
    make: Callable[[], Engine], stop: tuple[str, ...]
) -> None:
    sequence = make_sequence(3, range(5, 25), max_tokens=18, stop=stop, frequency_penalty=0.3, logprobs=1)
    whole = run(make(), sequence)[3, 0]
    beside = [make_sequence(20 + at, prompt, max_tokens=9) for at, prompt in enumerate(prompts(3))]
    engine = make()
    for cut in range(len(whole.ids)):
        again = restored_at(sequence, whole, cut)
        told = run(engine, again, *beside)[3, 0]
        assert whole.ids[:cut] + told.ids == whole.ids
        assert whole.logprobs[cut:] == told.logprobs
        assert told.end == whole.end
        assert whole.text.endswith(told.text)


def test_released_text_and_the_rest_after_a_resume_join(make: Callable[[], Engine], vocabulary: Vocabulary) -> None:
    sequence = make_sequence(4, max_tokens=18, stop=(" e", "\n\n"))
    whole = run(make(), sequence)[4, 0]
    engine = make()
    for cut in range(len(whole.ids)):
        told = run(engine, restored_at(sequence, whole, cut))[4, 0]
        assert vocabulary.render_text(whole.ids[:cut], sequence.stop) + told.text == whole.text


def test_several_choices_are_restored_each_from_where_it_stood(make: Callable[[], Engine]) -> None:
    sequence = make_sequence(1, range(3, 22), max_tokens=10, n=3, ignore_eos=True)
    whole = run(make(), sequence)
    restored = (
        Restored(tuple(whole[1, 0].ids[:4])),
        Restored(tuple(whole[1, 1].ids), "length"),
        Restored(()),
    )
    told = run(make(), msgspec.structs.replace(sequence, restored=restored))
    assert set(told) == {(1, 0), (1, 2)}
    assert told[1, 0].ids == whole[1, 0].ids[4:]
    assert told[1, 2].ids == whole[1, 2].ids


def test_text_grows_by_whole_characters(vocabulary: Vocabulary) -> None:
    for text in ("🌾 안녕하세요 👩‍👩‍👧!", "é" * 10):
        ids = vocabulary.encode_text(text)
        grown = [vocabulary.render_text(ids[:at]) for at in range(len(ids) + 1)]
        assert all(text.startswith(part) for part in grown)
        assert grown[-1] == text


def test_a_cancelled_sequence_says_nothing_more_and_frees_its_slot(engine: Engine) -> None:
    for ref in range(SLOTS + 1):
        engine.add(make_sequence(ref, max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    assert (engine.load().running, engine.load().waiting) == (SLOTS, 1)
    engine.cancel(Key(0, 1, 2))
    engine.cancel(Key(0, 1, 99))
    assert engine.load().running == SLOTS - 1
    spoke = {emission.key.ref for _ in range(4) for emission in engine.step()}
    assert spoke == {0, 1, 3, 4}


def test_a_dropped_epoch_says_nothing_more(engine: Engine) -> None:
    for ref, epoch in ((1, 1), (2, 2), (3, 1)):
        engine.add(make_sequence(ref, max_tokens=40, ignore_eos=True, key=Key(0, epoch, ref)))
    engine.step()
    engine.drop(0, 1)
    assert {emission.key.ref for _ in range(4) for emission in engine.step()} == {2}


def test_a_sequence_that_was_cancelled_may_come_again(engine: Engine, make: Callable[[], Engine]) -> None:
    sequence = make_sequence(1, max_tokens=10)
    engine.add(sequence)
    engine.step()
    engine.cancel(sequence.key)
    assert run(engine, sequence) == run(make(), sequence)


def test_a_suspect_runs_alone(engine: Engine) -> None:
    engine.add(make_sequence(1, max_tokens=5, ignore_eos=True))
    engine.add(make_sequence(2, max_tokens=5, alone=True, ignore_eos=True))
    engine.add(make_sequence(3, max_tokens=5, ignore_eos=True))
    order = []
    while engine.busy():
        spoke = {emission.key.ref for emission in engine.step()}
        assert len(spoke) <= 1
        order += spoke
    assert order == [1] * 5 + [2] * 5 + [3] * 5


def test_one_bad_request_fails_alone(make: Callable[[], Engine]) -> None:
    good = make_sequence(1, max_tokens=6)
    bad = [
        make_sequence(2, (10**9,)),
        make_sequence(3, max_tokens=10**6),
        make_sequence(4, n=SLOTS + 1),
        make_sequence(5, logit_bias={"1000000": 1.0}),
        make_sequence(6, temperature=float("inf")),
    ]
    told = run(make(), *bad, good)
    assert told[ONE] == run(make(), good)[ONE]
    assert all(told[ref, 0].error for ref in range(2, 7))


def test_hundreds_of_cancels_leak_nothing(engine: Engine) -> None:
    for round_ in range(60):
        for ref in range(6):
            engine.add(make_sequence(round_ * 10 + ref, prompts(6)[ref], max_tokens=20, n=1 + ref % 3))
        for _ in range(round_ % 4):
            engine.step()
        for ref in range(6):
            engine.cancel(Key(0, 1, round_ * 10 + ref))
    assert not engine.busy()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens, load.waiting_tokens) == (0, 0, 0, 0)
    assert isinstance(run(engine, make_sequence(1))[ONE], Told)


def test_no_token_is_drawn_that_the_tokenizer_lacks(engine: Engine, vocabulary: Vocabulary) -> None:
    """A model's rows are often filled up to a rounder number; what fills them was never trained."""
    hot = [make_sequence(ref, max_tokens=80, temperature=2.0, ignore_eos=True) for ref in range(4)]
    drawn = {token for told in run(engine, *hot).values() for token in told.ids}
    assert len(drawn) > 100 or isinstance(engine, SimulatedEngine)
    assert max(drawn) < vocabulary.vocab_size


def test_more_requests_than_slots_all_end(engine: Engine) -> None:
    told = run(engine, *(make_sequence(ref, max_tokens=4, n=1 + ref % 2) for ref in range(25)))
    assert len(told) == 37
    assert all(choice.over and not choice.error for choice in told.values())


def test_the_load_tells_what_waits() -> None:
    engine = SimulatedEngine(replace(LIMITS, slots=1), Pace(ttft_ms=0, tbt_ms=0))
    sequence: Sequence = make_sequence(1, range(3, 10))
    for ref in range(3):
        engine.add(msgspec.structs.replace(sequence, key=Key(0, 1, ref)))
    engine.step()
    load = engine.load()
    assert (load.running, load.waiting, load.waiting_tokens, load.kv_used_tokens) == (1, 2, 14, 15)
