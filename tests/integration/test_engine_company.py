"""A request's neighbours change nothing of it: sampled or not, penalised or not, long or short, come and gone."""

from __future__ import annotations

import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_world import LIMITS, make_sequence, run, write_model

from workers.engine.protocol import Key, Sequence
from workers.engine.runner import load_runner
from workers.engine.tokenizer import Tokenizer
from workers.engine.torch_engine import TorchEngine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model_dir: Path) -> TorchEngine:
    torch.set_num_threads(1)
    runner = load_runner(model_dir, slots=LIMITS.slots, context_tokens=LIMITS.context_tokens, threads=1)
    return TorchEngine(runner, Tokenizer.load(model_dir), LIMITS)


def test_a_seeded_request_never_changes_whatever_runs_beside_it(engine: TorchEngine) -> None:
    seeded = make_sequence(0, range(3, 20), 15, seed=42, temperature=1.2, logprobs=2)
    alone = run(engine, seeded)[0, 0]
    chance = random.Random(1)
    for _ in range(8):
        others = [
            make_sequence(ref, range(3, 4 + chance.randrange(40)), 10, seed=chance.getrandbits(64), top_p=0.9)
            for ref in range(1, 4)
        ]
        assert run(engine, *others[:1], seeded, *others[1:])[0, 0] == alone


def test_a_long_and_a_short_prompt_together_one_penalised_are_each_as_alone(engine: TorchEngine) -> None:
    penalised = make_sequence(
        1, range(3, 60), 20, temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.4
    )
    plain = make_sequence(2, (7,), 20, temperature=0.0)
    together = run(engine, penalised, plain)
    assert together[1, 0] == run(engine, penalised)[1, 0]
    assert together[2, 0] == run(engine, plain)[2, 0]
    unpunished = msgspec.structs.replace(penalised, sampling=plain.sampling)
    assert run(engine, unpunished)[1, 0].ids != together[1, 0].ids


def test_an_empty_prompt_fails_alone(engine: TorchEngine) -> None:
    good = make_sequence(1)
    told = run(engine, make_sequence(2, ()), good)
    assert told[2, 0].error == "the prompt has no tokens"
    assert told[1, 0] == run(engine, good)[1, 0]


def test_a_prompts_logprobs_are_the_models_own_whatever_the_pieces(engine: TorchEngine) -> None:
    prompt = tuple(range(3, 48))  # three pieces of 16 tokens
    asked = make_sequence(1, prompt, 3, prompt_logprobs=2, n=2)
    said = [emission for emission in _emissions(engine, asked, make_sequence(2, range(9, 30))) if emission.key.ref == 1]
    scored = [emission.prompt for emission in said if emission.prompt is not None]
    assert len(scored) == 1
    assert (scored[0].ids, len(scored[0].logprobs)) == (prompt, len(prompt) - 1)
    for at in (1, 15, 16, 17, 32, 44):  # the likeliest token there is what greedy would have said
        following = run(engine, make_sequence(3, prompt[:at], 1, temperature=0.0, logprobs=2, ignore_eos=False))[3, 0]
        if following.ids:
            (expected,) = following.logprobs
            entry = scored[0].logprobs[at - 1]
            assert entry.top[0][0] == following.ids[0]
            assert math.isclose(entry.top[0][1], expected.logprob, abs_tol=1e-2)  # type: ignore[attr-defined]
    assert run(engine, msgspec.structs.replace(asked, prompt_logprobs=None))[1, 1].ids == _ids(said, 1)


def test_a_thousand_that_hang_up_leave_nothing(engine: TorchEngine) -> None:
    chance = random.Random(2)
    waiting: list[Key] = []
    for ref in range(1_000):
        engine.add(make_sequence(ref, range(3, 4 + ref % 30), 20, n=1 + ref % 3, prompt_logprobs=0))
        waiting.append(Key(0, 1, ref))
        if ref % 7 == 0:
            engine.step()
        while len(waiting) > chance.randrange(12):
            engine.cancel(waiting.pop(chance.randrange(len(waiting))))
    for key in waiting:
        engine.cancel(key)
    assert not engine.busy()
    load = engine.load()
    assert (load.running, load.waiting, load.kv_used_tokens, load.waiting_tokens) == (0, 0, 0, 0)
    assert run(engine, make_sequence(1))[1, 0].over


def test_a_choice_whose_numbers_are_none_takes_its_siblings_along_and_nobody_else(engine: TorchEngine) -> None:
    sick = make_sequence(1, range(3, 20), 6, n=2, ignore_eos=True, prompt_logprobs=0)
    well = make_sequence(2, (5, 6), 6, ignore_eos=True)
    alone = run(engine, well)[2, 0]
    real = engine._runner.run

    def poisoned(work: list) -> np.ndarray:  # type: ignore[type-arg]
        logits, row = real(work).copy(), 0
        for item in work:
            if any(generation.sequence.key.ref == 1 for generation in item.draws):
                logits[row : row + item.rows] = np.nan
            row += item.rows
        return logits

    engine._runner.run = poisoned  # type: ignore[method-assign,assignment]
    told = run(engine, sick, well)
    engine._runner.run = real  # type: ignore[method-assign]
    assert told[1, 0].error == "the model gave no usable numbers for this request"
    assert told[2, 0] == alone
    assert engine.load().running == 0


def _emissions(engine: TorchEngine, *sequences: Sequence) -> list:  # type: ignore[type-arg]
    for sequence in sequences:
        engine.add(sequence)
    said = []
    while engine.busy():
        said += engine.step()
    return said


def _ids(said: list, choice: int) -> list[int]:  # type: ignore[type-arg]
    return [token for emission in said if emission.choice == choice for token in emission.ids]
