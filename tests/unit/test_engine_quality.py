"""The quality gate: what a class costs, and which one a model runs in unasked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_world import write_model

from workers.engine import quality
from workers.engine.errors import ModelUnusable
from workers.engine.native.build import possible
from workers.engine.quality import Cost
from workers.engine.runner import load_runner

needs_kernels = pytest.mark.skipif(not possible(), reason="no C++ compiler or no AVX2 here")


def cost(share: float) -> Cost:
    return Cost(text="mill", tokens=10, perplexity=20 * (1 + share), reference=20.0, agreement=0.9)


def test_the_fastest_class_that_costs_little_is_the_default() -> None:
    assert quality.chosen({"latency": (cost(0.004), cost(0.0099)), "throughput": (cost(0.001),)}) == "latency"
    assert quality.chosen({"latency": (cost(0.004), cost(0.011)), "throughput": (cost(0.001),)}) == "throughput"
    assert quality.chosen({"latency": (cost(0.02),), "throughput": (cost(0.02),)}) == "bf16"
    assert quality.chosen({"latency": (cost(-0.001),), "throughput": (cost(0.02),)}) == "latency"


def test_a_model_that_was_never_measured_has_no_default(tmp_path: Path) -> None:
    assert quality.default_of(tmp_path) is None
    (tmp_path / quality.RECORD).write_text("{")
    with pytest.raises(ModelUnusable, match=r"quality\.json is broken"):
        quality.default_of(tmp_path)


@needs_kernels
@pytest.mark.timeout(300)
def test_what_is_measured_is_kept_beside_the_model(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    made = quality.record(directory)
    assert quality.recorded(directory) == made
    assert quality.default_of(directory) == made.default
    assert set(made.classes) == {"latency", "throughput"}
    for costs in made.classes.values():
        assert [entry.text for entry in costs] == list(quality.TEXTS)
        assert all(entry.tokens > 500 and 0 < entry.agreement <= 1 for entry in costs)
    assert load_runner(directory, slots=1, context_tokens=64, threads=1).fingerprint.startswith(made.default)


def test_perplexity_is_the_exponent_of_the_mean_surprise(tmp_path: Path) -> None:
    runner = load_runner(write_model(tmp_path), slots=1, context_tokens=512, threads=1, numerics="exact")
    ids = [int(token) for token in np.random.default_rng(1).integers(3, 260, 300)]
    scored = quality.score(runner, ids)
    logits = torch.from_numpy(np.concatenate([runner.score(ids[:256]), runner.score(ids[256:], 256)]))[:-1]
    expected = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:])).exp()
    assert scored.perplexity == pytest.approx(float(expected), rel=1e-6)
    assert scored.likeliest.tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.model
@needs_kernels
def test_the_shipped_model_s_classes_cost_at_most_one_per_cent() -> None:
    from millstream.model import prepare
    from millstream.paths import cache_dir

    found = quality.recorded(prepare(cache_dir(), print))
    assert found is not None
    for costs in found.classes.values():
        assert all(entry.cost <= quality.MOST_COST and entry.agreement > 0.95 for entry in costs)
