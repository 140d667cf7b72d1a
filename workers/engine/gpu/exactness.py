"""What must hold on a device, checked by running it: for `measure`, and for the tests where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from workers.engine.gpu.build import Built
from workers.engine.gpu.device import Eager
from workers.engine.gpu.kernels import Batch, Cache, Kernels, Matrix
from workers.engine.gpu.pages import PAGE_TOKENS, pages_of
from workers.engine.gpu.passes import Item, passes, place
from workers.engine.gpu.plain import PlainKernels
from workers.engine.gpu.runner import Order

_ROUNDING = 2.0**-7
"""what a few roundings to bf16 may cost, of the largest number"""
_LOGITS = {torch.bfloat16: 0.06, torch.float32: 1e-3}
"""how far logits may be from transformers', of the largest; both of them round"""
_INT8 = 0.1
"""and what weights of eight bits may add: gross mistakes are what is looked for here"""
_COUNTS = (1, 2, 7, 16, 17, 64, 65, 128, 200, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One check's outcome."""

    name: str
    good: bool
    detail: str


def checks(built: Built, model_dir: Path) -> Iterator[Found]:
    """All that concern one rank. Leaves the pages as they were."""
    with torch.inference_mode():
        yield from _linear(built)
        yield from _attention(built)
        yield _graphs(built)
        yield _company(built)
        yield _replay(built)
        yield _transformers(built, model_dir)


def _linear(built: Built) -> Iterator[Found]:
    """Each matrix of a layer and the head: near float32, and a row the same among any number of rows."""
    layer, kernels, device = built.weights.layers[0], built.kernels, built.weights.shard.device
    for name in ("qkv", "output", "gate_up", "down", "head"):
        matrix: Matrix = built.weights.head if name == "head" else getattr(layer, name)
        rows = torch.randn(_COUNTS[-1], matrix.values.shape[1], device=device).to(kernels.dtype)
        whole = kernels.linear(rows, matrix, wide=True)
        exact = rows[:8].float() @ matrix.values.float().T
        exact = exact if matrix.scale is None else exact * matrix.scale
        exact = exact if matrix.bias is None else exact + matrix.bias
        alike = all(torch.equal(kernels.linear(rows[:count], matrix, wide=True), whole[:count]) for count in _COUNTS)
        off = _off(whole[:8], exact)
        yield Found(name=f"linear {name}", good=alike and off < _ROUNDING, detail=_said(off, alike))


def _attention(built: Built) -> Iterator[Found]:
    """Over scattered pages, against float32 over the same ones; and each sequence alone."""
    kernels, heads, device = built.kernels, built.weights.layers[0].heads, built.weights.shard.device
    lengths = [1, 2, 63, 255, 256, 257, 300, 511, 700]
    each = pages_of(max(lengths))
    size = (each * len(lengths) + 1, PAGE_TOKENS, heads.keys, heads.size)
    cache = Cache(
        keys=torch.randn(size, device=device).to(kernels.dtype),
        values=torch.randn(size, device=device).to(kernels.dtype),
    )
    table = torch.randperm(size[0] - 1).view(len(lengths), each).add(1).to(device, torch.int32)
    for decode in (True, False):
        counts = [1 if decode else min(length, 50) for length in lengths]
        queries = torch.randn(sum(counts), heads.queries, heads.size, device=device).to(kernels.dtype)

        def attended(
            of: Kernels, begin: int, end: int, decode: bool, queries: torch.Tensor, counts: list[int]
        ) -> torch.Tensor:
            rows = slice(sum(counts[:begin]), sum(counts[:end]))
            batch = _batch(decode, counts[begin:end], lengths[begin:end], table[begin:end].contiguous())
            return of.attend(queries[rows], cache, batch)

        whole = attended(kernels, 0, len(lengths), decode, queries, counts)
        alone = [attended(kernels, at, at + 1, decode, queries, counts) for at in range(len(lengths))]
        exact = attended(PlainKernels(), 0, len(lengths), decode, queries, counts)
        alike, off = torch.equal(torch.cat(alone), whole), _off(whole.float(), exact)
        name = f"attention, {'tokens' if decode else 'pieces'}"
        yield Found(name=name, good=alike and off < _ROUNDING, detail=_said(off, alike))


def _batch(decode: bool, counts: list[int], lengths: list[int], table: torch.Tensor) -> Batch:
    begins = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32, device=table.device)
    unused = begins[:0]
    return Batch(
        decode=decode,
        longest=max(counts),
        ids=unused,
        positions=unused,
        cells=unused,
        begins=begins,
        lengths=torch.tensor(lengths, dtype=torch.int32, device=table.device),
        table=table,
    )


def _graphs(built: Built) -> Found:
    """A replay gives the bits of the same kernels started one by one."""
    pages, eager = built.rank.pages, Eager(built.model, built.weights.shard.device)
    slots = range(min(len(pages.table), pages.free, 37))
    _obey(built, [_prompt(slot, 3 + slot) for slot in slots])
    alike = []
    for count in {1, 2, 3, len(slots) // 2 or 1, len(slots)}:
        items = [_token(slot, 3 + slot) for slot in slots[:count]]
        place(items, pages)
        (work,) = passes(items, pages, 256)
        alike.append(torch.equal(built.runs.run(work), eager.run(work)))
    _release(built)
    return Found(name="replays against single kernels", good=all(alike), detail=_said(0.0, all(alike)))


def _company(built: Built) -> Found:
    """A prompt and its tokens, alone and among as many others as there is room for."""
    slots = range(1, min(len(built.rank.pages.table), built.rank.pages.free // 2, 200))
    alone = [_obey(built, [_prompt(0, 40)])] + [_obey(built, [_token(0, 40 + at)]) for at in range(4)]
    _release(built)
    crowd = [_obey(built, [*(_prompt(slot, 1 + slot) for slot in slots), _prompt(0, 40)])[-1:]]
    crowd += [
        _obey(built, [*(_token(slot, 1 + slot + at) for slot in slots), _token(0, 40 + at)])[-1:] for at in range(4)
    ]
    _release(built)
    alike = all(map(torch.equal, alone, crowd))
    return Found(name=f"a sequence among {len(slots)} others", good=alike, detail=_said(0.0, alike))


def _replay(built: Built) -> Found:
    """A resumed answer computes its tokens in few passes: the bits of one token at a time."""
    _obey(built, [_prompt(0, 20)])
    for at in range(40):
        single = _obey(built, [_token(0, 20 + at)])
    _release(built)
    _obey(built, [_prompt(0, 20)])
    ids = tuple(token for at in range(40) for token in _token(0, 20 + at).ids)
    alike = torch.equal(_obey(built, [Item(0, 20, ids, True, (), 1)]), single)
    _release(built)
    return Found(name="a replay against single steps", good=alike, detail=_said(0.0, alike))


def _transformers(built: Built, model_dir: Path) -> Found:
    """The likeliest token after each of 64 positions, and the logits, against transformers' own model."""
    from transformers import AutoModelForCausalLM

    ids = _prompt(0, 64).ids
    theirs = AutoModelForCausalLM.from_pretrained(model_dir, dtype=built.kernels.dtype).to(built.weights.shard.device)
    expected = theirs(torch.tensor([ids], device=built.weights.shard.device)).logits[0].float()
    mine = [_obey(built, [Item(0, 0, ids[:32], False, (), 1)])]
    mine += [_obey(built, [Item(0, at, ids[at : at + 1], True, (), 1)]) for at in range(32, 64)]
    _release(built)
    logits = torch.cat(mine)
    off, same = _off(logits, expected[31:]), (logits.argmax(1) == expected[31:].argmax(1)).float().mean().item()
    bound = _LOGITS[built.kernels.dtype] + (_INT8 if built.weights.shard.int8 else 0)
    return Found(name="transformers", good=off < bound, detail=f"{off:.1e} off, likeliest token the same {same:.0%}")


def _prompt(slot: int, tokens: int) -> Item:
    return Item(slot, 0, tuple((slot * 7 + at * 13) % 251 for at in range(tokens)), False, (), 1)


def _token(slot: int, position: int) -> Item:
    return Item(slot, position, ((slot * 5 + position) % 251,), True, (), 1)


def _obey(built: Built, items: list[Item]) -> torch.Tensor:
    return built.rank.obey(Order((), tuple(items)))


def _release(built: Built) -> None:
    built.rank.pages.release(range(len(built.rank.pages.table)))


def _off(mine: torch.Tensor, exact: torch.Tensor) -> float:
    return float((mine - exact).abs().max() / exact.abs().max())


def _said(off: float, alike: bool) -> str:
    return f"{off:.1e} off, {'the same bits' if alike else 'OTHER BITS'}"
