"""What `millstream up` says when it is ready, and the first run.json."""

from __future__ import annotations

import contextlib
import platform
import shlex
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from millstream.runfile import Run, created_s
from millstream.stack import REGION, SLOTS, Stack
from millstream.state import DEFAULT_STATE, StateDir


def first_run(stack: Stack, pid: int) -> Run:
    """run.json at the start of a stack's life."""
    return Run(
        pid=pid,
        created_s=created_s(pid) or 0.0,
        state="starting",
        started_ms=time.time_ns() // 1_000_000,
        port=stack.port,
        kafka_port=stack.kafka_port,
        clickhouse_port=stack.clickhouse_port,
        ledger_port=stack.ledger_port,
        region=REGION,
        model=stack.served.name,
        engine_kind=stack.served.engine_kind,
        state_dir=str(stack.state_dir),
        versions={"millstream": _version("millstream"), "python": platform.python_version()},
        slots=SLOTS,
    )


def ready_text(run: Run, state: StateDir, *, detached: bool) -> str:
    """The block to paste from."""
    key = state.key_file.read_text().strip()
    took_s = ((run.ready_ms or run.started_ms) - run.started_ms) / 1000
    body = {"model": run.model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    end = f"`{down_command(state)}` stops it." if detached else "Ctrl-C stops it."
    return f"""
Millstream is ready after {took_s:.1f} s.

  API    {run.base_url}
  key    {key}   (also in {state.key_file})
  model  {run.model}

Try it:

  curl -N {run.base_url}/chat/completions \\
    -H 'Authorization: Bearer {key}' -H 'Content-Type: application/json' \\
    -d {shlex.quote(msgspec.json.encode(body).decode())}

{end}"""


def down_command(state: StateDir) -> str:
    """The command that stops the stack of this state directory."""
    directory = "" if state.path == Path.cwd() / DEFAULT_STATE else f" --state {shlex.quote(str(state.path))}"
    return f"{_command()} down{directory}"


def _command() -> str:
    """How the command can be called from here: by its name if that is on the PATH, else by where it is."""
    if shutil.which("millstream") is not None:
        return "millstream"
    here = Path(sys.executable).with_name("millstream")
    with contextlib.suppress(ValueError):
        here = here.relative_to(Path.cwd())
    return shlex.quote(str(here))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
