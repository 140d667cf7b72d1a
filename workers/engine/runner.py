"""From a model directory to the runner of a numerics class."""

from __future__ import annotations

from pathlib import Path

import torch

from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable
from workers.engine.forward import Logits, Runner
from workers.engine.native.build import kernels
from workers.engine.native.runner import NativeRunner
from workers.engine.native.weights import load as load_packed
from workers.engine.numerics import EXACT, NATIVE, THROUGHPUT
from workers.engine.plain import PlainRunner, check_library
from workers.engine.plain_weights import load as load_plain
from workers.engine.quality import default_of
from workers.engine.scheduler import Work

__all__ = ["Logits", "Runner", "load_runner"]


def load_runner(
    model_dir: Path, *, slots: int, context_tokens: int, threads: int, numerics: str | None = None
) -> Runner:
    """The runner of a model directory, warm, on so many threads of this process. ModelUnusable.

    `numerics`: a class by name; else the model's own default, or without one what this machine can run.
    """
    torch.set_num_threads(threads)
    architecture = Architecture.read(model_dir)
    if context_tokens > architecture.context_tokens:
        raise ModelUnusable(
            f"the model takes {architecture.context_tokens} tokens of context, not {context_tokens};"
            f" lower MILLSTREAM_CONTEXT_TOKENS"
        )
    runner = _made(model_dir, slots, context_tokens, threads, numerics)
    warm = Work(slot=0, start=0, ids=(0,) * min(16, context_tokens), stepwise=False)
    runner.run([warm])
    return runner


def _made(model_dir: Path, slots: int, context_tokens: int, threads: int, numerics: str | None) -> Runner:
    name = numerics or default_of(model_dir)
    library = None if name == EXACT else kernels()
    if library is None:
        if name not in (None, EXACT):
            raise ModelUnusable(
                f"the class {name!r} needs a C++ compiler and a processor with AVX2; install g++, or set"
                f" MILLSTREAM_NUMERICS to {EXACT}"
            )
        weights = load_plain(model_dir)
        check_library(weights)
        return PlainRunner(weights, slots=slots, context_tokens=context_tokens)
    packed = load_packed(model_dir, NATIVE[name or THROUGHPUT.name])
    return NativeRunner(library, packed, slots=slots, context_tokens=context_tokens, threads=threads)
