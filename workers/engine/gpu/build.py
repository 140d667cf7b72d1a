"""Builds one rank: its weights, its kernels, its share of the cache."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable
from workers.engine.gpu.device import Eager, Runs
from workers.engine.gpu.kernels import Kernels
from workers.engine.gpu.model import Model, page_bytes
from workers.engine.gpu.pages import PAGE_TOKENS, Pages, kv_tokens, pages_of
from workers.engine.gpu.plain import PlainKernels
from workers.engine.gpu.ranks import Alone, Group, Ranks
from workers.engine.gpu.runner import Rank
from workers.engine.gpu.source import Files, Source
from workers.engine.gpu.weights import Shard, Weights, check_even, load

_MEMORY_SHARE = 0.9
"""of what is free once the weights are there; the rest is for what a pass computes"""
_HEAD_MULTIPLE, _HEAD_MOST = 8, 256
"""sizes of a head that flash attention takes"""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is told first."""

    model_dir: str
    device: str
    """cuda, or reference: plain torch on the CPU"""
    int8: bool
    rank: int
    ranks: int
    port: int
    """of rank 0's store on this machine, over which the ranks find each other; 0 for one rank"""
    slots: int
    context_tokens: int
    threads: int
    pages: int | None = None
    """of the cache; None: as many as can be used, or fit"""
    blocks: int = 0
    """of the prefix cache"""
    block_tokens: int = PAGE_TOKENS


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that is ready, and what there is to know of it."""

    rank: Rank
    model: Model
    runs: Runs
    weights: Weights
    kernels: Kernels
    kv_tokens: int


def build(setup: Setup, source: Source | None = None, architecture: Architecture | None = None) -> Built:
    """A rank, loaded; all ranks must be built at once. `source` and `architecture`: instead of the directory's.

    ModelUnusable.
    """
    torch.set_num_threads(setup.threads)
    if architecture is None:
        architecture = Architecture.read(Path(setup.model_dir))
    _check(architecture, setup)
    shard = Shard(
        rank=setup.rank,
        ranks=setup.ranks,
        device=_device(setup),
        dtype=torch.bfloat16 if setup.device == "cuda" else torch.float32,
        int8=setup.int8,
    )
    weights = load(architecture, source or Files(Path(setup.model_dir)), shard)
    kernels, ranks = _kernels(setup), _ranks(setup, shard.device)
    pages = ranks.least(_pages(setup, weights, kernels))
    promised = kv_tokens(pages - _kept(setup), setup.slots, setup.context_tokens)
    if promised < setup.context_tokens:
        raise ModelUnusable(
            f"the GPU has room for {promised} tokens of {setup.slots} sequences, less than one context of"
            f" {setup.context_tokens}; lower MILLSTREAM_CONTEXT_TOKENS or MILLSTREAM_ENGINE_SLOTS, or use more GPUs"
        )
    model = Model(weights, kernels, ranks, pages=pages, context_tokens=setup.context_tokens)
    table = Pages(pages, slots=setup.slots, context_tokens=setup.context_tokens, block_tokens=setup.block_tokens)
    runs = _runs(model, setup, shard.device)
    rank = Rank(model, runs, table)
    return Built(rank=rank, model=model, runs=runs, weights=weights, kernels=kernels, kv_tokens=promised)


def _check(architecture: Architecture, setup: Setup) -> None:
    if setup.context_tokens > architecture.context_tokens:
        raise ModelUnusable(
            f"the model takes {architecture.context_tokens} tokens of context, not {setup.context_tokens};"
            f" lower MILLSTREAM_CONTEXT_TOKENS"
        )
    if architecture.head_size % _HEAD_MULTIPLE or architecture.head_size > _HEAD_MOST:
        raise ModelUnusable(f"heads of {architecture.head_size} dimensions can't be run on a GPU")
    if setup.block_tokens % PAGE_TOKENS:
        raise ModelUnusable(f"blocks of {setup.block_tokens} tokens aren't whole pages of {PAGE_TOKENS}")
    check_even(architecture, setup.ranks)
    if setup.device == "cuda" and torch.cuda.device_count() < setup.ranks:
        raise ModelUnusable(f"{setup.ranks} GPUs are asked for, but {torch.cuda.device_count()} can be used")


def _device(setup: Setup) -> torch.device:
    if setup.device != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", setup.rank)
    torch.cuda.set_device(device)
    return device


def _kernels(setup: Setup) -> Kernels:
    if setup.device != "cuda":
        return PlainKernels()
    from workers.engine.gpu.launch import CudaKernels  # Triton isn't there without CUDA's torch

    return CudaKernels(setup.context_tokens)


def _ranks(setup: Setup, device: torch.device) -> Ranks:
    if setup.ranks == 1:
        return Alone()
    store = TCPStore("127.0.0.1", setup.port, setup.ranks, is_master=False)
    return Group(store, setup.rank, setup.ranks, device)


def _pages(setup: Setup, weights: Weights, kernels: Kernels) -> int:
    if setup.pages is not None:
        return setup.pages
    wanted = setup.slots * pages_of(setup.context_tokens) + _kept(setup) + 1
    if setup.device != "cuda":
        return wanted
    free_bytes, _ = torch.cuda.mem_get_info(weights.shard.device)
    return min(wanted, int(free_bytes * _MEMORY_SHARE) // page_bytes(weights, kernels))


def _kept(setup: Setup) -> int:
    """Pages that the prefix cache may hold."""
    return setup.blocks * pages_of(setup.block_tokens)


def _runs(model: Model, setup: Setup, device: torch.device) -> Runs:
    if device.type != "cuda":
        return Eager(model, device)
    from workers.engine.gpu.graphs import Graphs

    return Graphs(model, device, pages=pages_of(setup.context_tokens))
