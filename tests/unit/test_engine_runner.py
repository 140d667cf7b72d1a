"""The forward pass: right against transformers' own, and the same numbers whatever runs beside a sequence."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_world import write_model
from safetensors.torch import load_file, save_file

from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable
from workers.engine.generation import Generation
from workers.engine.native.pack import four_bits
from workers.engine.numerics import checked
from workers.engine.plain_weights import load as load_plain
from workers.engine.runner import Runner, load_runner
from workers.engine.scheduler import Work
from workers.engine.weights import precompute

DRAW = (object.__new__(Generation),)
"""stands for whoever draws: the runner doesn't look"""
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama untied, a vocabulary that fills no block": {"tie_word_embeddings": False, "vocab_size": 277},
    "llama 3.1": {"rope_parameters": LLAMA_3_1},
    "llama, a key head for each head": {"num_key_value_heads": 6},
    "llama, seven heads for a key head": {"num_attention_heads": 14, "head_dim": 32, "hidden_size": 448},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
CLASSES = ["bf16", "throughput", "latency", "exact"]
MOST_OFF = {"bf16": 0.03, "throughput": 0.08, "latency": 0.15, "exact": 0.03}
"""of the largest logit; random weights have no redundancy, so that few bits cost more than in a trained model"""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=CLASSES)
def numerics(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def runner_of(directory: Path, numerics: str, slots: int = 8, threads: int = 1) -> Runner:
    return load_runner(directory, slots=slots, context_tokens=128, threads=threads, numerics=numerics)


def piece(slot: int, start: int, ids: tuple[int, ...]) -> Work:
    return Work(slot=slot, start=start, ids=ids, stepwise=False, draws=DRAW)  # type: ignore[arg-type]


def steps(slot: int, start: int, ids: tuple[int, ...]) -> Work:
    return Work(slot=slot, start=start, ids=ids, stepwise=True, draws=DRAW)  # type: ignore[arg-type]


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(number).integers(3, 260, length))


def round_to_four_bits(directory: Path) -> None:
    """Layers as if they had come from a file of four-bit weights: then four bits lose nothing but of activations."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj.weight" in name:
            whole, scale, least = four_bits(tensor)
            tensors[name] = (whole * scale[..., None] + least[..., None]).view(tensor.shape)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.timeout(600)  # transformers takes its time to import on a busy machine
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path, **SHAPES[shape])  # type: ignore[arg-type]
    round_to_four_bits(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = prompt_of(1, 40)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    for numerics in CLASSES:
        mine = runner_of(directory, numerics)
        got = [mine.run([piece(0, 0, ids[:16])])[0], mine.run([piece(0, 16, ids[16:32])])[0]]
        got += [mine.run([steps(0, at, (ids[at],))])[0] for at in range(32, 40)]
        for at, row in zip((15, 31, *range(32, 40)), got, strict=True):
            off = np.abs(row - expected[at]).max() / np.abs(expected[at]).max()
            assert off < MOST_OFF[numerics], f"{numerics}: position {at} is off by {off:.1%}"


def test_a_sequence_computes_the_same_alone_and_in_any_company(model_dir: Path, numerics: str) -> None:
    ids = prompt_of(5, 30)
    alone = runner_of(model_dir, numerics)
    expected = [alone.run([piece(0, 0, ids[:16])])[0], alone.run([piece(0, 16, ids[16:20])])[0]]
    expected += [alone.run([steps(0, at, (ids[at],))])[0] for at in range(20, 30)]
    crowded = runner_of(model_dir, numerics)
    others = [prompt_of(number, 90) for number in range(7)]

    def beside(at: int) -> list[Work]:
        return [
            steps(slot, at, (other[at],)) if slot % 2 else piece(slot, at, other[at : at + 11])
            for slot, other in enumerate(others)
        ]

    got = [
        crowded.run([*beside(0), piece(7, 0, ids[:16])])[-1],
        crowded.run([piece(7, 16, ids[16:20]), *beside(20)])[0],
    ]
    got += [crowded.run([*beside(at)[:3], steps(7, at, (ids[at],)), *beside(at)[3:]])[3] for at in range(20, 30)]
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


def test_replayed_tokens_give_the_bits_of_single_steps(model_dir: Path, numerics: str) -> None:
    ids = prompt_of(6, 40)
    first = runner_of(model_dir, numerics)
    first.run([piece(0, 0, ids[:10])])
    for at in range(10, 40):
        expected = first.run([steps(0, at, (ids[at],))])[0]
    again = runner_of(model_dir, numerics)
    again.run([piece(3, 0, ids[:10])])
    again.run([steps(3, 10, ids[10:23])])
    assert np.array_equal(again.run([steps(3, 23, ids[23:])])[0], expected)


@pytest.mark.parametrize("numerics", CLASSES[:-1])
def test_natively_no_cut_and_no_number_of_threads_changes_a_bit(model_dir: Path, numerics: str) -> None:
    ids = prompt_of(9, 100)
    one = runner_of(model_dir, numerics, threads=1)
    expected = np.concatenate([one.score([token], at) for at, token in enumerate(ids)])
    for threads, borders in ((2, (0, 100)), (3, (0, 1, 3, 7, 50, 51, 100)), (2, (0, 16, 32, 33, 99, 100))):
        cut = runner_of(model_dir, numerics, threads=threads)
        cut._kv.fill_(float("nan"))  # what was never written must not matter
        got = [cut.score(ids[begin:end], begin) for begin, end in itertools.pairwise(borders)]
        assert np.array_equal(np.concatenate(got), expected)


def test_copies_continue_like_the_original(model_dir: Path, numerics: str) -> None:
    ids = prompt_of(7, 20)
    mine = runner_of(model_dir, numerics)
    mine.run([Work(slot=0, start=0, ids=ids, stepwise=False, copies=(2, 5))])
    rows = mine.run([steps(slot, 20, (9,)) for slot in (0, 2, 5)])
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_a_slot_used_again_remembers_nothing(model_dir: Path, numerics: str) -> None:
    ids = prompt_of(8, 12)
    fresh, used = runner_of(model_dir, numerics), runner_of(model_dir, numerics)
    used.run([piece(0, 0, prompt_of(3, 90))])
    assert np.array_equal(used.run([piece(0, 0, ids)]), fresh.run([piece(0, 0, ids)]))


def test_precomputed_weights_are_the_ones_made_at_the_start(tmp_path: Path, numerics: str) -> None:
    directory = write_model(tmp_path)
    ids = prompt_of(8, 12)
    made_now = runner_of(directory, numerics)
    precompute(directory)
    read = runner_of(directory, numerics)
    assert made_now.fingerprint == read.fingerprint
    assert np.array_equal(made_now.run([piece(0, 0, ids)]), read.run([piece(0, 0, ids)]))


def test_other_weights_and_other_classes_have_other_fingerprints(tmp_path: Path, model_dir: Path) -> None:
    runners = [
        runner_of(directory, numerics)
        for directory in (write_model(tmp_path, seed=1), model_dir)
        for numerics in CLASSES
    ]
    assert len({runner.fingerprint for runner in runners}) == len(runners)


def test_a_model_that_cannot_run_here_is_refused_with_a_reason(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ModelUnusable, match="512 tokens of context, not 513"):
        load_runner(model_dir, slots=1, context_tokens=513, threads=2)
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    broken = write_model(tmp_path / "other")
    (broken / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelUnusable, match="missing or broken"):
        load_plain(broken)
    with pytest.raises(ModelUnusable, match="missing or broken"):
        runner_of(broken, "bf16")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"mlp_bias": True}, "biases"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "sliding window"),
        ({"partial_rotary_factor": 0.5}, "part of a head"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
    ],
)
def test_what_a_model_has_and_no_runner_computes_is_named(tmp_path: Path, changes: dict[str, object], why: str) -> None:
    with pytest.raises(ModelUnusable, match=why):
        Architecture.read(write_model(tmp_path, **changes))  # type: ignore[arg-type]


def test_sizes_that_the_kernels_cannot_take_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="multiples of 32"):
        runner_of(write_model(tmp_path / "a", intermediate_size=150), "bf16")
    with pytest.raises(ModelUnusable, match="multiple of 16"):
        runner_of(write_model(tmp_path / "b", head_dim=8, num_attention_heads=12), "bf16")


def test_only_a_class_that_there_is_can_be_chosen() -> None:
    assert checked("sim") is checked("") is None
    assert [checked(name) for name in CLASSES] == CLASSES
    with pytest.raises(
        ModelUnusable, match="MILLSTREAM_NUMERICS is 'int3'; use one of latency, throughput, bf16 or exact"
    ):
        checked("int3")


def test_stretched_frequencies_are_llama_3_1s(tmp_path: Path) -> None:
    plain = Architecture.read(write_model(tmp_path / "a")).inverse_frequencies
    stretched = Architecture.read(write_model(tmp_path / "b", rope_parameters=LLAMA_3_1)).inverse_frequencies
    for before, after in zip(plain, stretched, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 64 / 4:
            assert after == before
        elif wavelength > 64 / 1:
            assert after == before / 8
        else:
            assert before / 8 < after < before
