"""The native kernels: what a linear layer computes, and how their library comes to be."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest
import torch

from workers.engine.native import build, library
from workers.engine.native.pack import BLOCK, eight_bits, four_bits, pack
from workers.engine.native.weights import heaviest

BITS = [4, 8, 16]
LARGEST = 2**31 - 1


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    found = build.kernels()
    if found is None:
        pytest.skip("no C++ compiler or no AVX2 here")
    return found


def multiplied(
    kernels: ctypes.CDLL, weight: torch.Tensor, rows: torch.Tensor, bits: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    packed = pack(weight, bits)
    outputs = -(-len(weight) // BLOCK) * BLOCK
    padded = None if bias is None else torch.nn.functional.pad(bias, (0, outputs - len(bias)))
    layer = library.Linear(
        bits=bits,
        inputs=packed.inputs,
        outputs=outputs,
        weight=packed.weight.data_ptr(),
        scale=packed.scale.data_ptr(),
        bias=None if padded is None else padded.data_ptr(),
        heaviest=heaviest(packed).item() if bits == 8 else 1.0,
    )
    out = torch.empty(len(rows), outputs)
    rows = rows.contiguous()
    kernels.millstream_multiply(ctypes.addressof(layer), rows.data_ptr(), len(rows), out.data_ptr())
    return out[:, : len(weight)]


def restored(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The weight as its class holds it."""
    if bits == 4:
        whole, scale, least = four_bits(weight)
        return (whole * scale[..., None] + least[..., None]).view(weight.shape)
    if bits == 8:
        whole, scale = eight_bits(weight)
        return whole * scale[:, None]
    return weight.bfloat16().float()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (50, 96), (576, 1536)])
def test_a_linear_layer_multiplies_what_it_holds(kernels: ctypes.CDLL, bits: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn(outputs, inputs, generator=generator)
    rows, bias = torch.randn(13, inputs, generator=generator), torch.randn(outputs, generator=generator)
    expected = (rows.double() @ restored(weight, bits).double().T + bias).float()
    got = multiplied(kernels, weight, rows, bits, bias)
    most = {4: 0.02, 8: 1e-3, 16: 1e-5}[bits]  # of activations, as eight bits of a group, sixteen of a row, or floats
    assert (got - expected).abs().max() < most * expected.abs().max()


@pytest.mark.parametrize("bits", BITS)
def test_a_row_comes_out_the_same_in_any_company(kernels: ctypes.CDLL, bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 160, generator=generator)
    rows = torch.randn(40, 160, generator=generator) * torch.logspace(-3, 3, 40)[:, None]
    together = multiplied(kernels, weight, rows, bits)
    for begin, end in ((0, 1), (3, 5), (7, 10), (0, 6), (5, 12), (33, 40), (1, 40)):
        assert torch.equal(multiplied(kernels, weight, rows[begin:end], bits), together[begin:end])


@pytest.mark.parametrize("inputs", [32, 1536, 8192])
def test_no_sum_of_eight_bit_products_leaves_thirty_two_bits(kernels: ctypes.CDLL, inputs: int) -> None:
    """A row along its channel is the worst case of Cauchy and Schwarz: all products have one sign."""
    weight = torch.randn(4, inputs, generator=torch.Generator().manual_seed(2))
    got = multiplied(kernels, weight, restored(weight, 8) * 1e6, 8).diagonal()
    expected = restored(weight, 8).square().sum(dim=1) * 1e6
    assert torch.allclose(got, expected, rtol=1e-3)
    equal = torch.ones(1, inputs)
    assert torch.allclose(multiplied(kernels, equal, equal * 3, 8), torch.full((1, 1), 3.0 * inputs), rtol=1e-3)


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_zeros_give_zeros(kernels: ctypes.CDLL, bits: int) -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(3))
    assert not multiplied(kernels, weight, torch.zeros(2, 64), bits).any()
    assert not multiplied(kernels, torch.zeros(8, 64), torch.randn(2, 64), bits).any()


def test_weights_of_four_bits_stay_what_they_are() -> None:
    """So that a file of four-bit weights loses nothing on its way."""
    once = restored(torch.randn(64, 96, generator=torch.Generator().manual_seed(4)), 4)
    assert torch.allclose(restored(once, 4), once, atol=2e-3)


def test_no_scale_that_was_tried_fits_better(kernels: ctypes.CDLL) -> None:
    weight = torch.randn(16, 512, generator=torch.Generator().manual_seed(5))
    peak = weight.abs().amax(dim=1, keepdim=True) / 127
    plain = (weight / peak).round() * peak
    assert ((restored(weight, 8) - weight).square().sum(1) <= (plain - weight).square().sum(1) + 1e-6).all()


@pytest.mark.timeout(600)  # a compiler takes its time on a busy machine
def test_the_library_is_built_once_and_whole(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    path = build.LIBRARY.path(environ)
    assert path.parent == tmp_path / "millstream" / "native"
    assert build.LIBRARY.build(path, environ)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert build.typed(ctypes.CDLL(str(path))).millstream_scratch()
    assert build.possible({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""})


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}
    assert not build.possible(environ)
    with caplog.at_level(logging.WARNING):
        assert not build.LIBRARY.build(build.LIBRARY.path(environ), environ)
    assert "install g++" in caplog.text


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    compiler.chmod(0o755)
    environ = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler), "PATH": ""}
    with caplog.at_level(logging.WARNING):
        assert not build.LIBRARY.build(build.LIBRARY.path(environ), environ)
    assert "no such thing" in caplog.text
    assert not build.LIBRARY.path(environ).exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file"), "PATH": "/usr/bin:/bin"}
    with caplog.at_level(logging.WARNING):
        assert not build.LIBRARY.build(build.LIBRARY.path(environ), environ)
    assert "can't be kept" in caplog.text


def test_only_processors_with_all_instructions_are_capable(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not build._capable(cpuinfo)
    for flags, capable in (("sse2 avx", False), ("sse2 avx2 fma f16c", True), ("avx2 fma", False)):
        cpuinfo.write_text(f"processor : 0\nflags\t\t: {flags}\n")
        assert build._capable(cpuinfo) is capable
