"""A stack in the background: `up --detach` waits until it is ready, `down` until it is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from millstream import runfile, welcome
from millstream.errors import FAILED, StackError
from millstream.runfile import Run
from millstream.state import StateDir, is_running, locked, open_state, rotate
from millstream.wish import Say, Wish

DOWN_WITHIN_S = 120.0
_POLL_S = 0.05


def start(wish: Wish, say: Say, tell: Say) -> int:
    """Start a stack and return when it is ready, or has failed; the exit code. `say` gets progress and the reason."""
    state = open_state(wish.state_dir)
    with locked(state):  # one that runs already is an error of ours, not one to look for in its log
        log = state.log("supervisor")
        rotate(log)
        log.touch(mode=0o600)
    seen = _Tail(log)
    with log.open("ab") as out:
        child = subprocess.Popen(
            _argv(wish),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=dict(wish.environ),
        )
    try:
        return _follow(child, state, seen, say, tell)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise


def stop(state_dir: Path, *, now: bool) -> str:
    """Stop the stack and wait until nothing of it runs; a sentence. NotRunning without one."""
    run = runfile.running(state_dir)
    state = StateDir.at(state_dir)
    _signal(run, now=now)
    give_up = time.monotonic() + DOWN_WITHIN_S
    while is_running(state) or runfile.alive(run.pid, run.created_s):
        if time.monotonic() > give_up:
            raise StackError(
                f"the stack still stops after {DOWN_WITHIN_S:.0f} s; hurry it with `millstream down --now --state"
                f" {state_dir}`"
            )
        time.sleep(_POLL_S)
    return "stopped"


def _signal(run: Run, *, now: bool) -> None:
    try:
        os.kill(run.pid, signal.SIGTERM)
        if now:
            time.sleep(0.2)  # two signals at once would be one
            os.kill(run.pid, signal.SIGTERM)
    except ProcessLookupError:
        return


def _argv(wish: Wish) -> list[str]:
    options = {
        "--state": str(wish.state_dir),
        "--port": str(wish.port),
        "--kafka-port": str(wish.kafka_port),
        "--clickhouse-port": str(wish.clickhouse_port),
        "--engine": wish.engine_kind,
        "--workers": str(wish.workers),
    }
    if wish.model is not None:
        options["--model"] = wish.model
    if wish.threads is not None:
        options["--threads"] = str(wish.threads)
    return [
        sys.executable,
        "-m",
        "millstream",
        "up",
        "--background",
        *(part for pair in options.items() for part in pair),
    ]


def _follow(child: subprocess.Popen[bytes], state: StateDir, seen: _Tail, say: Say, tell: Say) -> int:
    while True:
        code, run = child.poll(), runfile.read(state)
        seen.pass_on(say)
        if code is not None:
            seen.pass_on(say)
            return code or FAILED
        if run is not None and run.pid == child.pid and run.state == "ready":
            tell(welcome.ready_text(run, state, detached=True))
            return 0
        time.sleep(_POLL_S)


class _Tail:
    """What a log gains from now on."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._seen = log.stat().st_size

    def pass_on(self, say: Say) -> None:
        """Say every whole line that is new."""
        with self._log.open("rb") as file:
            file.seek(self._seen)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._seen += len(whole)
        if whole:
            say(whole.decode(errors="replace").rstrip("\n"))
