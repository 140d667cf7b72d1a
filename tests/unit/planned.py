"""A stack as it is planned, for tests that start none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from millstream import stack
from millstream.stack import Stack


def a_stack(**changes: Any) -> Stack:
    """A plan in which no two ports are the same; `changes` replace its fields."""
    fields: dict[str, Any] = {
        "state_dir": Path("/state"),
        "port": 8080,
        "kafka_port": 9092,
        "clickhouse_port": 8123,
        "controller_port": 9093,
        "ledger_port": 9100,
        "key_secret": "ab" * 32,
        "served": stack.simulated(),
        "workers": 1,
        "threads": 1,
        "environ": {},
    }
    return Stack(**fields | changes)
