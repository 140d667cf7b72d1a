"""`python -m workers.engine.gpu.measure`: checks this machine's GPU, then measures it; under five minutes.

    --model DIR        a model directory; without one, random weights of a --shape are made
    --shape NAME       smollm2 (default), llama8b or tiny
    --numerics NAME    bf16 (default) or int8; one GPU
    --device reference the same in plain torch on the CPU, to try the script itself
    --streams N        no more than so many at once (256)
    --piece N          tokens of a prompt that are computed at once (2048)
    --json FILE        the figures, to be kept

Exit status 1 when a check fails: then the numerics class promises what the device doesn't hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from workers.engine.errors import EngineError, ModelUnusable
from workers.engine.gpu.build import Built, Setup, build
from workers.engine.gpu.engine import fingerprint
from workers.engine.gpu.exactness import checks
from workers.engine.gpu.graphs import SIZES
from workers.engine.gpu.numerics import Numerics
from workers.engine.gpu.runner import PagedRunner
from workers.engine.gpu.shapes import SHAPES, write
from workers.engine.scheduler import Work

_DRAWS = (None,)
"""stands for whoever draws: the runner doesn't look"""
_PROMPT_TOKENS = 64
_STEPS = 32
Figures = dict[str, float | str]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when all checks hold."""
    options = _options(argv)
    try:
        if options.model is not None:
            return _measured(options, options.model)
        with tempfile.TemporaryDirectory() as made:
            write(Path(made), options.shape, torch.device("cuda" if options.device == "cuda" else "cpu"))
            return _measured(options, Path(made))
    except EngineError as exc:
        print(exc, file=sys.stderr)
        return 1


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checks this machine's GPU, then measures it.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2")
    parser.add_argument("--numerics", choices=("bf16", "int8"), default="bf16")
    parser.add_argument("--device", choices=("cuda", "reference"), default="cuda")
    parser.add_argument("--streams", type=int, default=SIZES[-1])
    parser.add_argument("--piece", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def _measured(options: argparse.Namespace, model_dir: Path) -> int:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ModelUnusable("torch finds no GPU here")
    began_s = time.perf_counter()
    numerics = Numerics.parse(options.numerics)
    built = build(
        Setup(
            model_dir=str(model_dir),
            device=options.device,
            int8=numerics.int8,
            rank=0,
            ranks=1,
            port=0,
            slots=options.streams,
            context_tokens=2 * max(options.piece, 256),
            threads=torch.get_num_threads(),
        )
    )
    figures: Figures = {"class": fingerprint(numerics, built), "ready s": time.perf_counter() - began_s}
    failed = 0
    for found in checks(built, model_dir):
        print(f"{'ok  ' if found.good else 'FAIL'} {found.name}: {found.detail}", flush=True)
        failed += not found.good
    for part in (
        _memory(built),
        _matrices(built, options.piece),
        _prefill(built, options.piece),
        _decode(built, options.streams),
    ):
        figures |= part
        for name, figure in part.items():
            print(f"{name}: {figure:,.1f}" if isinstance(figure, float) else f"{name}: {figure}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({**figures, "checks failed": failed}, indent=1))
    return 1 if failed else 0


def _memory(built: Built) -> Figures:
    if built.weights.shard.device.type != "cuda":
        return {}
    return {
        "device": torch.cuda.get_device_name(),
        "memory in use GiB": torch.cuda.memory_allocated() / 2**30,
        "tokens of cache": float(built.kv_tokens),
    }


def _matrices(built: Built, piece: int) -> Figures:
    """The largest matrix of a layer: as a share of what reading it takes for one row, and against torch's product."""
    device, matrix = built.weights.shard.device, built.weights.layers[0].gate_up
    if device.type != "cuda":
        return {}
    outputs, inputs = matrix.values.shape
    plain = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    figures: Figures = {}
    for count in (1, 64, 256, piece):
        rows = torch.randn(count, inputs, device=device, dtype=torch.bfloat16)
        mine_s = _device_s(lambda rows=rows: built.kernels.linear(rows, matrix))
        theirs_s = _device_s(lambda rows=rows: F.linear(rows, plain))
        figures[f"gate_up of {count} rows, us"] = mine_s * 1e6
        figures[f"gate_up of {count} rows by torch in bf16, us"] = theirs_s * 1e6
    return figures


def _device_s(call: object, repeats: int = 50) -> float:
    assert callable(call)
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def _prefill(built: Built, piece: int) -> Figures:
    """The second piece of a prompt, as the engine cuts it; its logits on the host at the end."""
    runner, best_s = _runner(built), float("inf")
    for _ in range(3):
        runner.run([_work(0, 0, piece, stepwise=False)])
        began_s = time.perf_counter()
        runner.run([_work(0, piece, piece, stepwise=False)])
        best_s = min(best_s, time.perf_counter() - began_s)
    runner.release((0,))
    return {"prefill tok/s": piece / best_s}


def _decode(built: Built, most: int) -> Figures:
    """Steps of so many streams, logits on the host, without the sampler."""
    runner, figures = _runner(built), {}
    for streams in (size for size in SIZES if size <= most):
        for slot in range(streams):
            runner.run([_work(slot, 0, _PROMPT_TOKENS, stepwise=False)])
        began_s = time.perf_counter()
        for at in range(_PROMPT_TOKENS, _PROMPT_TOKENS + _STEPS):
            runner.run([_work(slot, at, 1, stepwise=True) for slot in range(streams)])
        figures[f"decode tok/s, {streams} streams"] = streams * _STEPS / (time.perf_counter() - began_s)
        runner.release(range(streams))
    return dict(figures)


def _runner(built: Built) -> PagedRunner:
    return PagedRunner(built.rank, fingerprint="", vocab_size=built.weights.architecture.vocab_size)


def _work(slot: int, start: int, count: int, *, stepwise: bool) -> Work:
    ids = tuple((slot * 31 + at * 7) % 200 for at in range(start, start + count))
    return Work(slot=slot, start=start, ids=ids, stepwise=stepwise, draws=_DRAWS)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
