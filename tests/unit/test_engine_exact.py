"""The plain runner's arithmetic: sums that are exact, whatever the order they are made in."""

from __future__ import annotations

import pytest
import torch

from workers.engine import plain
from workers.engine.exact import Linear, multiplies_exactly, quantise, reach_of


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


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
    normed, activated = plain._norm(rows, weight, 1e-5), plain.silu(rows.clone())
    for count in (1, 2, 5, 22, 64, 200):
        for begin in (0, 77, 400 - count):
            part = slice(begin, begin + count)
            assert torch.equal(plain._norm(rows[part], weight, 1e-5), normed[part])
            assert torch.equal(plain.silu(rows[part].clone()), activated[part])
