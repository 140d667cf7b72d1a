"""Run by test_engine_kernels.py: each kernel, and a whole model with all of them, against plain torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from engine_world import write_model

from workers.engine.architecture import Architecture
from workers.engine.gpu.device import Eager
from workers.engine.gpu.kernels import Batch, Cache, Heads, Matrix, Turn
from workers.engine.gpu.launch import TILES, ComputeKernels
from workers.engine.gpu.model import Model
from workers.engine.gpu.pages import PAGE_TOKENS, Pages
from workers.engine.gpu.passes import Item
from workers.engine.gpu.plain import PlainKernels
from workers.engine.gpu.ranks import Alone
from workers.engine.gpu.runner import Order, Rank
from workers.engine.gpu.source import Files
from workers.engine.gpu.weights import Shard, load, quantised

PLAIN, MINE = PlainKernels(), ComputeKernels(torch.float32)
torch.manual_seed(0)


class Paged(ComputeKernels):
    """With plain attention, which has no Triton in it."""

    attend = PlainKernels.attend


def tell(name: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    print(f"{name}: off by {((mine - theirs).abs().max() / theirs.abs().max()).item():.1e}")


def linear() -> None:
    for outputs, inputs in ((70, 96), (130, 256)):
        weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
        for matrix in (Matrix(values=weight), Matrix(values=weight, bias=bias), quantised(weight, bias)):
            rows = torch.randn(TILES[-1].rows + 3, inputs)
            many = MINE.linear(rows, matrix)
            tell("linear", many, PLAIN.linear(rows, matrix))
            for count in (1, 16, 17, 64):
                tell("linear", MINE.linear(rows[:count], matrix, wide=True), many[:count])


def norm() -> None:
    residual, delta, weight = torch.randn(3, 96), torch.randn(3, 96), torch.randn(96)
    mine, theirs = residual.clone(), residual.clone()
    tell("norm", MINE.norm(mine, None, weight, 1e-5), PLAIN.norm(theirs, None, weight, 1e-5))
    tell("norm", MINE.norm(mine, delta, weight, 1e-5), PLAIN.norm(theirs, delta, weight, 1e-5))
    tell("norm", mine, theirs)


def place() -> None:
    """With a head's size that is no power of two, and with each head normalised."""
    for size, normed in ((16, False), (24, True)):
        norms = (torch.randn(size), torch.randn(size)) if normed else (None, None)
        heads = Heads(queries=4, keys=2, size=size, epsilon=1e-5, query_norm=norms[0], key_norm=norms[1])
        numbers = torch.tensor([5, 700, 260], dtype=torch.int32)
        batch = Batch(
            decode=True,
            longest=1,
            ids=numbers,
            positions=numbers,
            cells=numbers,
            begins=numbers,
            lengths=numbers,
            table=numbers,
        )
        turn = Turn(cos=torch.randn(701, size // 2), sin=torch.randn(701, size // 2))
        mixed = torch.randn(3, 8 * size)
        caches = [
            Cache(keys=torch.zeros(3, PAGE_TOKENS, 2, size), values=torch.zeros(3, PAGE_TOKENS, 2, size)) for _ in "ab"
        ]
        tell(
            "place", MINE.place(mixed, heads, turn, caches[0], batch), PLAIN.place(mixed, heads, turn, caches[1], batch)
        )
        tell("place", caches[0].keys, caches[1].keys)
        tell("place", caches[0].values, caches[1].values)


def gate() -> None:
    wide = torch.randn(3, 2 * 1100) * 4
    tell("gate", MINE.gate(wide), PLAIN.gate(wide))


def model() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory), model_type="qwen2")
        architecture = Architecture.read(path)
        shard = Shard(rank=0, ranks=1, device=torch.device("cpu"), dtype=torch.float32, int8=True)
        weights = load(architecture, Files(path), shard)

        def rank(kernels: PlainKernels | Paged) -> Rank:
            made = Model(weights, kernels, Alone(), pages=9, context_tokens=512)
            return Rank(made, Eager(made, shard.device), Pages(9, slots=4, context_tokens=512))

        prompt = Item(0, 0, tuple(range(3, 43)), False, (1,), 1)
        tokens = [Item(slot, 40, (9, 10), True, (), 1) for slot in (0, 1)]
        mine, theirs = rank(Paged(torch.float32)), rank(PLAIN)
        for items in ((prompt,), tokens):
            order = Order((), tuple(items))
            tell("model", mine.obey(order), theirs.obey(order))


if __name__ == "__main__":
    linear()
    norm()
    place()
    gate()
    model()
