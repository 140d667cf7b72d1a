"""What the user asked `millstream up` for. Imports nothing slow: `up --detach` needs no more of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream.stack import EngineKind

Say = Callable[[str], None]
"""takes a line of progress"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for."""

    state_dir: Path
    port: int = 8080
    kafka_port: int = 9092
    clickhouse_port: int = 8123
    engine_kind: EngineKind = "torch"
    workers: int = 1
    threads: int | None = None
    model: str | None = None
    """one that `millstream model add` added; None: the model that is always there"""
    environ: Mapping[str, str]
