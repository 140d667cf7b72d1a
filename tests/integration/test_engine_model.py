"""The real model: right against transformers' own, the same alone and in a crowd, and after a resume."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_world import make_sequence, restored_at, run

from millstream.model import prepare
from millstream.paths import cache_dir
from workers.engine.protocol import Sequence
from workers.engine.runner import Runner, load_runner
from workers.engine.scheduler import Limits
from workers.engine.tokenizer import Tokenizer
from workers.engine.torch_engine import TorchEngine

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
LIMITS = Limits(slots=12, context_tokens=512, kv_tokens=12 * 512, chunk_tokens=256, step_tokens=256)
QUESTIONS = [
    "What is a water mill?",
    "Write a haiku about rivers.",
    "한국의 수도는 어디인가요?",
    "List three uses of flour, with an emoji each 🌾",
    "Explain Kafka's log in two sentences.",
    "Count from 1 to 20.",
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare(cache_dir(), print)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> Runner:
    return load_runner(model_dir, slots=LIMITS.slots, context_tokens=LIMITS.context_tokens, threads=2)


@pytest.fixture
def engine(runner: Runner, tokenizer: Tokenizer) -> TorchEngine:
    return TorchEngine(runner, tokenizer, LIMITS)


def asked(tokenizer: Tokenizer, ref: int, **changes: object) -> Sequence:
    prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[ref % len(QUESTIONS)]}])
    return make_sequence(ref, prompt, **{"max_tokens": 24, **changes})  # type: ignore[arg-type]


def test_the_prompt_is_the_one_the_model_was_trained_on(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi  1"}])
    assert b"".join(map(tokenizer.token_label, ids)).decode() == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi  1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [token for token in ids if token < 17] == [1, 2, 1, 2, 1]
    assert tokenizer.eos_ids == {2}
    two_spaces, digit = tokenizer.encode_plain("  1")  # digits stand alone, so the spaces stay together
    assert tokenizer.token_bytes(two_spaces) == b"  "
    assert tokenizer.token_bytes(digit) == b"1"


@pytest.mark.parametrize(
    ("numerics", "most_off", "agreement"), [("bf16", 0.04, 0.97), ("throughput", 0.1, 0.94), ("latency", 0.1, 0.94)]
)
def test_logits_agree_with_transformers(
    tokenizer: Tokenizer, model_dir: Path, numerics: str, most_off: float, agreement: float
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    mine = load_runner(model_dir, slots=1, context_tokens=256, threads=2, numerics=numerics)
    agree = []
    for question in QUESTIONS[:3]:
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        with torch.inference_mode():
            expected = theirs(torch.tensor([ids])).logits[0].numpy()
        got = mine.score(ids)
        agree += list(got.argmax(axis=1) == expected.argmax(axis=1))
        assert np.abs(got - expected).max() < most_off * np.abs(expected).max()
    assert np.mean(agree) > agreement


def test_a_crowd_says_what_each_says_alone(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    sequences = [asked(tokenizer, ref, temperature=0.8 * (ref % 3), top_p=0.95) for ref in range(12)]
    together = run(engine, *sequences)
    for sequence in sequences[::3]:
        assert run(engine, sequence)[sequence.key.ref, 0] == together[sequence.key.ref, 0]


def test_a_resumed_answer_goes_on_identically(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    sequence = asked(tokenizer, 3, stop=("\n\n",))
    whole = run(engine, sequence)[3, 0]
    for cut in range(0, len(whole.ids), 5):
        told = run(engine, restored_at(sequence, whole, cut), asked(tokenizer, 4))[3, 0]
        assert whole.ids[:cut] + told.ids == whole.ids
        assert tokenizer.render_text(whole.ids[:cut], sequence.stop) + told.text == whole.text
        assert told.end == whole.end


def test_it_answers_sensibly_and_ends_by_itself(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    sequence = make_sequence(
        1,
        tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]),
        max_tokens=60,
        temperature=0.0,
    )
    told = run(engine, sequence)[1, 0]
    assert "Paris" in told.text
    assert told.end == "stop"
    assert run(engine, msgspec.structs.replace(sequence, max_tokens=2))[1, 0].end == "length"
