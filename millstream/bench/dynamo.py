"""The real router of NVIDIA Dynamo on the Mooncake trace, with its own simulated engines.

It runs in an environment of its own under the cache directory and is no dependency of anything.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from millstream.bench.traces import DIRECTORY, MOONCAKE
from millstream.errors import StartFailed
from millstream.paths import cache_dir
from millstream.wish import Say

VERSION = "1.6.1"
_ALONE = (f"ai-dynamo=={VERSION}", f"ai-dynamo-runtime=={VERSION}")
"""without what they ask for, which is a serving stack"""
_NEEDED = ("pydantic", "uvloop", "typing-extensions")
_REPLAY = """
import json, sys
from dynamo.llm import KvRouterConfig
from dynamo.replay.api import run_trace_replay
trace, speed, scale = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
router = {"router_mode": "round_robin"} if not scale else {
    "router_mode": "kv_router", "router_config": KvRouterConfig(prefill_load_scale=scale), "kv_event_lag_ms": 0.0}
report = run_trace_replay(trace, num_workers=8, arrival_speedup_ratio=speed, trace_block_size=512,
                          sla_ttft_ms=2000.0, sla_itl_ms=25.0, **router)
print(json.dumps(report.summary))
"""
_TIMEOUT_S = 900.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of what it reports, what is compared."""

    completed_requests: int
    goodput_completed_requests: int
    prefix_cache_reused_ratio: float
    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float
    p99_tpot_ms: float


class Real(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    policy: str
    speed: float
    summary: Summary


def replay(speeds: tuple[float, ...], say: Say) -> Iterator[Real]:
    """Round robin and its key/value router, with both scales. StartFailed where it can't be installed or run."""
    python = _environment(say)
    with tempfile.TemporaryDirectory(prefix="millstream-bench-") as directory:
        trace = Path(directory) / "trace.jsonl"
        trace.write_bytes(gzip.decompress((DIRECTORY / MOONCAKE).read_bytes()))
        for speed in speeds:
            for policy, scale in (("round robin", 0), ("dynamo-1", 1), ("dynamo-4", 4)):
                say(f"ai-dynamo {VERSION} at ×{speed:g}: {policy}")
                text = _run([python, "-c", _REPLAY, str(trace), str(speed), str(scale)])
                yield Real(policy=policy, speed=speed, summary=summary(text))


def summary(text: str) -> Summary:
    """Its last line is the report; before it there may be what it logs. StartFailed where it isn't one."""
    try:
        return msgspec.json.decode(text.strip().rpartition("\n")[2], type=Summary)
    except msgspec.MsgspecError as exc:
        raise StartFailed(f"ai-dynamo {VERSION} answers what isn't its report: {text[-300:]!r}") from exc


def _environment(say: Say) -> str:
    """Its Python, installed if it isn't."""
    directory = cache_dir() / f"ai-dynamo-{VERSION}"
    python, done = directory / "bin" / "python", directory / ".done"
    if not done.exists():
        say(f"installing ai-dynamo {VERSION} into {directory}")
        _run([sys.executable, "-m", "venv", "--clear", str(directory)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *_ALONE])
        _run([str(python), "-m", "pip", "install", "--quiet", *_NEEDED])
        done.touch()
    return str(python)


def _run(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv, env={**os.environ, "DYN_LOG": "error"}, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        why = getattr(exc, "stderr", None) or str(exc)
        raise StartFailed(f"ai-dynamo {VERSION} can't be run here: {str(why)[-300:]}") from exc
    return done.stdout
