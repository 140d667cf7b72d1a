"""Engines to compare: each a process that takes one question a line and answers it, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from millstream.errors import StartFailed
from wire.settings import PREFIX

LOOPS = Path(__file__).parent / "loops"
_READY_BYTES = b'{"ready": true}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """How to start one."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    """beside what all have"""
    asks: frozenset[str] = frozenset({"prefill", "decode", "perplexity"})
    """what it can be asked"""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """To one question."""

    value: float


class Running:
    """A contender that is ready. Idle, it takes no time from the others."""

    def __init__(self, contender: Contender, environ: Mapping[str, str]) -> None:
        """StartFailed if it ends before it is ready."""
        self.contender = contender
        began_s = time.perf_counter()
        self._process = subprocess.Popen(
            contender.argv,
            env={**environ, **contender.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        while (line := self._line()) != _READY_BYTES:
            if not line:
                self.close()
                raise StartFailed(
                    f"{contender.name} did not start; run it by hand to see why: {' '.join(contender.argv)}"
                )
        self.ready_s = time.perf_counter() - began_s

    def ask(self, question: Mapping[str, object]) -> float:
        """StartFailed if it ends instead of answering."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(question) + b"\n")
        self._process.stdin.flush()
        while line := self._line():
            if line.startswith(b'{"value"'):
                return msgspec.json.decode(line, type=Answer).value
        raise StartFailed(f"{self.contender.name} ended when it was asked for {question['what']}")

    def memory_mb(self) -> float:
        """The most that was resident, in MB."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return line.strip() or (b" " if line else b"")


def ours(name: str, model_dir: Path, *, threads: int, streams: int, context_tokens: int) -> Contender:
    """Millstream's engine in a numerics class."""
    settings = {
        "ENGINE_KIND": "torch",
        "ENGINE_SLOTS": str(streams),
        "ENGINE_THREADS": str(threads),
        "MODEL_DIR": str(model_dir),
        "NUMERICS": name,
        "CONTEXT_TOKENS": str(context_tokens),
        "ENGINE_PREFIX_TOKENS": "0",
    }
    return Contender(
        name=f"millstream {name}",
        argv=(sys.executable, "-m", "workers.engine.measure"),
        environ={PREFIX + key: value for key, value in settings.items()},
    )
