"""From a configuration to an engine over pages: its ranks started, its numbers checked, warm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore

from workers.engine.errors import ModelUnusable
from workers.engine.gpu.build import Built, Setup, build
from workers.engine.gpu.check import check_invariance
from workers.engine.gpu.follow import Followers
from workers.engine.gpu.numerics import Numerics
from workers.engine.gpu.pages import PAGE_TOKENS
from workers.engine.gpu.runner import Logits, PagedRunner
from workers.engine.scheduler import Limits, Work
from workers.engine.torch_engine import TorchEngine
from workers.engine.vocabulary import Vocabulary


class PagedEngine(TorchEngine):
    """A `TorchEngine` whose runner learns which slots are free again."""

    def __init__(self, runner: PagedRunner, vocabulary: Vocabulary, limits: Limits) -> None:
        super().__init__(runner, vocabulary, limits)
        self._paged = runner

    def _run(self, work: Sequence[Work]) -> Logits:
        self._paged.release(self._scheduler.freed())
        return super()._run(work)


def load_engine(
    model_dir: Path, vocabulary: Vocabulary, limits: Limits, *, device: str, numerics: str, threads: int
) -> PagedEngine:
    """The engine of a model directory on `device` (cuda or reference). ModelUnusable."""
    wanted = Numerics.parse(numerics)
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelUnusable("MILLSTREAM_ENGINE_DEVICE is cuda, but torch finds no GPU here")
    store = None if wanted.ranks == 1 else _store(wanted.ranks)
    setup = Setup(
        model_dir=str(model_dir),
        device=device,
        int8=wanted.int8,
        rank=0,
        ranks=wanted.ranks,
        port=0 if store is None else store.port,
        slots=limits.slots,
        context_tokens=limits.context_tokens,
        threads=threads,
        blocks=limits.prefix_blocks,
        block_tokens=limits.chunk_tokens if limits.prefix_blocks else PAGE_TOKENS,
    )
    followers = None if store is None else Followers(setup)
    built = build(setup)
    if built.weights.architecture.vocab_size < vocabulary.vocab_size:
        raise ModelUnusable(f"{model_dir}: the tokenizer has more tokens than the model")
    runner = PagedRunner(
        built.rank,
        fingerprint=fingerprint(wanted, built),
        vocab_size=built.weights.architecture.vocab_size,
        tell=None if followers is None else followers.tell,
    )
    check_invariance(runner, built.rank.pages, limits)
    return PagedEngine(runner, vocabulary, replace(limits, kv_tokens=built.kv_tokens))


def fingerprint(numerics: Numerics, built: Built) -> str:
    """The numerics class, and what else the numbers depend on: weights, kernels, kind of GPU, torch."""
    device = built.weights.shard.device
    chip = "sm{}{}".format(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else "cpu"
    release = ".".join(torch.__version__.split(".")[:2])
    return f"{numerics.name}-{built.weights.digest}-{built.kernels.name}-{chip}-{release}"


def _store(ranks: int) -> TCPStore:
    """Where the ranks of this machine find each other."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
