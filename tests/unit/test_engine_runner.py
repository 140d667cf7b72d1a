"""The forward pass: right against transformers' own, and the same numbers whatever runs beside a sequence."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_world import write_model

from workers.engine import runner as running
from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable
from workers.engine.exact import Linear, multiplies_exactly, quantise, reach_of
from workers.engine.generation import Generation
from workers.engine.runner import Runner, load_runner, silu
from workers.engine.scheduler import Work
from workers.engine.weights import load, precompute

DRAW = (object.__new__(Generation),)
"""stands for whoever draws: the runner doesn't look"""
SHAPES = {
    "llama": {},
    "llama untied": {"tie_word_embeddings": False},
    "llama 3.1": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
}


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def runner_of(directory: Path, slots: int = 8) -> Runner:
    return Runner(load(directory), slots=slots, context_tokens=128)


def piece(slot: int, start: int, ids: tuple[int, ...]) -> Work:
    return Work(slot=slot, start=start, ids=ids, stepwise=False, draws=DRAW)  # type: ignore[arg-type]


def steps(slot: int, start: int, ids: tuple[int, ...]) -> Work:
    return Work(slot=slot, start=start, ids=ids, stepwise=True, draws=DRAW)  # type: ignore[arg-type]


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(number).integers(3, 260, length))


@pytest.mark.timeout(600)  # transformers takes its time to import on a busy machine
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: str) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path, **SHAPES[shape])  # type: ignore[arg-type]
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = prompt_of(1, 40)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    mine = runner_of(directory)
    got = [mine.run([piece(0, 0, ids[:16])])[0], mine.run([piece(0, 16, ids[16:32])])[0]]
    got += [mine.run([steps(0, at, (ids[at],))])[0] for at in range(32, 40)]
    for at, row in zip((15, 31, *range(32, 40)), got, strict=True):
        off = np.abs(row - expected[at]).max() / np.abs(expected[at]).max()
        assert off < 0.02, f"position {at} is off by {off:.1%}: more than ten bits explain"


def test_a_linear_layer_gives_a_row_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(3)
    layer = made(torch.randn(96, 576, generator=generator), generator)
    rows = torch.randn(300, 576, generator=generator) * torch.logspace(-3, 3, 300)[:, None]
    together = layer(rows)
    for count in (1, 2, 3, 7, 8, 31, 57, 64, 129):
        for begin in (0, 100, 300 - count):
            assert torch.equal(layer(rows[begin : begin + count]), together[begin : begin + count])


def made(weight: torch.Tensor, generator: torch.Generator) -> Linear:
    quantised, scale = quantise(weight)
    return Linear(quantised, scale, reach_of(quantised), torch.randn(len(weight), generator=generator))


@pytest.mark.parametrize("width", [1, 16, 576, 4096])
@pytest.mark.parametrize("peak", [0.0, 1.0, 1e4])
def test_no_sum_leaves_what_float32_holds_exactly(width: int, peak: float) -> None:
    """Rows along a channel are the worst case of Cauchy and Schwarz; all signs agree, so every partial sum grows."""
    generator = torch.Generator().manual_seed(width)
    quantised, _ = quantise(torch.randn(5, width, generator=generator))
    layer = Linear(quantised, torch.ones(5), reach_of(quantised))
    whole, unit = layer.quantise(quantised.float() + peak * torch.eye(5, width))
    assert torch.equal(whole, whole.round())
    assert (whole.double().abs() @ quantised.double().abs().T).max() <= 2**24
    assert torch.equal(layer.multiply(whole).double(), whole.double() @ quantised.double().T)
    assert torch.allclose(whole * unit, quantised.float() + peak * torch.eye(5, width), atol=unit.max().item())
    assert multiplies_exactly(layer, width)


def test_a_row_of_zeros_gives_the_bias() -> None:
    bias = torch.arange(8.0)
    quantised, scale = quantise(torch.randn(8, 32, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(Linear(quantised, scale, reach_of(quantised), bias)(torch.zeros(2, 32)), bias.expand(2, 8))


def test_a_library_that_shortens_float32_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, scale = quantise(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
    layer = Linear(quantised, scale, reach_of(quantised))
    exact = layer.multiply
    monkeypatch.setattr(layer, "multiply", lambda whole: exact(whole.bfloat16().float()))
    assert not multiplies_exactly(layer, 64)


@pytest.mark.parametrize("width", [64, 150, 1536])
def test_norms_and_silu_do_not_depend_on_the_rows_beside(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    rows, weight = torch.randn(400, width, generator=generator) * 5, torch.randn(width, generator=generator)
    normed, activated = running._norm(rows, weight, 1e-5), silu(rows.clone())
    for count in (1, 2, 5, 22, 64, 200):
        for begin in (0, 77, 400 - count):
            part = slice(begin, begin + count)
            assert torch.equal(running._norm(rows[part], weight, 1e-5), normed[part])
            assert torch.equal(silu(rows[part].clone()), activated[part])


def test_a_sequence_computes_the_same_alone_and_in_any_company(model_dir: Path) -> None:
    ids = prompt_of(5, 30)
    alone = runner_of(model_dir)
    expected = [alone.run([piece(0, 0, ids[:16])])[0], alone.run([piece(0, 16, ids[16:20])])[0]]
    expected += [alone.run([steps(0, at, (ids[at],))])[0] for at in range(20, 30)]
    crowded = runner_of(model_dir)
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


def test_replayed_tokens_give_the_bits_of_single_steps(model_dir: Path) -> None:
    ids = prompt_of(6, 40)
    first = runner_of(model_dir)
    first.run([piece(0, 0, ids[:10])])
    for at in range(10, 40):
        expected = first.run([steps(0, at, (ids[at],))])[0]
    again = runner_of(model_dir)
    again.run([piece(3, 0, ids[:10])])
    again.run([steps(3, 10, ids[10:23])])
    assert np.array_equal(again.run([steps(3, 23, ids[23:])])[0], expected)


def test_copies_continue_like_the_original(model_dir: Path) -> None:
    ids = prompt_of(7, 20)
    mine = runner_of(model_dir)
    mine.run([Work(slot=0, start=0, ids=ids, stepwise=False, copies=(2, 5))])
    rows = mine.run([steps(slot, 20, (9,)) for slot in (0, 2, 5)])
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_precomputed_weights_are_the_ones_made_at_the_start(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    ids = prompt_of(8, 12)
    made_now = runner_of(directory)
    precompute(directory)
    read = runner_of(directory)
    assert made_now.fingerprint == read.fingerprint
    assert np.array_equal(made_now.run([piece(0, 0, ids)]), read.run([piece(0, 0, ids)]))


def test_other_weights_have_another_fingerprint(tmp_path: Path, model_dir: Path) -> None:
    assert runner_of(write_model(tmp_path, seed=1)).fingerprint != runner_of(model_dir).fingerprint


def test_a_model_that_cannot_run_here_is_refused_with_a_reason(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(ModelUnusable, match="512 tokens of context, not 513"):
        load_runner(model_dir, slots=1, context_tokens=513, threads=2)
    with pytest.raises(ModelUnusable, match="'mamba'"):
        Architecture.read(write_model(tmp_path, model_type="mamba"))
    (tmp_path / "model.safetensors").unlink()
    write_config = write_model(tmp_path / "other")
    (write_config / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelUnusable, match="missing or broken"):
        load(write_config)


def test_stretched_frequencies_are_llama_3_1s(tmp_path: Path) -> None:
    plain = Architecture.read(write_model(tmp_path / "a")).inverse_frequencies
    stretched = Architecture.read(write_model(tmp_path / "b", **SHAPES["llama 3.1"])).inverse_frequencies  # type: ignore[arg-type]
    for before, after in zip(plain, stretched, strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 64 / 4:
            assert after == before
        elif wavelength > 64 / 1:
            assert after == before / 8
        else:
            assert before / 8 < after < before
