"""The state directory: its layout, its lock, its secrets. Everything a stack must remember lies in it."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import AlreadyRunning, StateBroken

LAYOUT = "1"
DEFAULT_STATE = ".millstream"
"""in the current directory"""
LOG_LIMIT_BYTES = 16 * 1024 * 1024
_LOCK_WAIT_S = 0.5


@dataclass(frozen=True, slots=True)
class StateDir:
    """Where things lie below one directory."""

    path: Path

    @classmethod
    def at(cls, path: Path) -> StateDir:
        """The one at `path`, whether or not it is there."""
        return cls(path.absolute())

    def is_at(self, known: os.stat_result) -> bool:
        """Whether the directory of this `stat` still lies there."""
        try:
            return os.path.samestat(self.path.stat(), known)
        except OSError:
            return False

    @property
    def layout_file(self) -> Path:
        return self.path / "layout"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def secret_file(self) -> Path:
        return self.path / "secret"

    @property
    def key_file(self) -> Path:
        return self.path / "dev-key"

    @property
    def kafka(self) -> Path:
        return self.path / "kafka"

    @property
    def installed_file(self) -> Path:
        """What the log was last made ready for: see millstream.install"""
        return self.kafka / "installed"

    @property
    def clickhouse(self) -> Path:
        return self.path / "clickhouse"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """Where the process `name` writes its log."""
        return self.logs / f"{name}.log"


def open_state(path: Path) -> StateDir:
    """The state directory at `path`, made if it isn't there. StateBroken when it can't be used."""
    state = StateDir.at(path)
    if path.exists() and not path.is_dir():
        raise StateBroken(f"{path} is a file; move it away, or name another directory with --state")
    try:
        state.path.mkdir(parents=True, exist_ok=True)
        _check_layout(state)
        for part in (state.kafka, state.clickhouse, state.logs):
            part.mkdir(exist_ok=True)
        _check_writable(state)
    except OSError as exc:
        raise StateBroken(
            f"{path} can't be used ({exc.strerror}: {exc.filename}); make it writable, or name another directory"
            " with --state"
        ) from exc
    return state


def _check_layout(state: StateDir) -> None:
    if state.layout_file.exists():
        found = state.layout_file.read_text(errors="replace").strip()
        if found != LAYOUT:
            raise StateBroken(
                f"{state.path} has layout {found[:20]!r}, this Millstream needs {LAYOUT}; name another directory with"
                " --state, or use the Millstream that made this one"
            )
        return
    if any(entry.name != "lock" for entry in state.path.iterdir()):
        raise StateBroken(
            f"{state.path} holds files that aren't Millstream's (there is no {state.layout_file.name} file);"
            " name an empty or new directory with --state"
        )
    state.layout_file.write_text(LAYOUT + "\n")


def _check_writable(state: StateDir) -> None:
    for directory in (state.path, state.kafka, state.clickhouse, state.logs):
        probe = directory / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()


@contextmanager
def locked(state: StateDir) -> Iterator[None]:
    """Hold the directory's lock; AlreadyRunning if another process holds it. The kernel frees it if we die."""
    descriptor = os.open(state.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(descriptor, state)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, state: StateDir) -> None:
    # Somebody who only asks whether the lock is held (`is_running`) holds it for a moment himself: wait a little.
    give_up = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as exc:
            if time.monotonic() > give_up:
                raise AlreadyRunning(
                    f"a stack runs on {state.path} already; stop it with `millstream down --state {state.path}`, or"
                    " name another directory with --state and other ports"
                ) from exc
            time.sleep(0.02)


def is_running(state: StateDir) -> bool:
    """Whether a supervisor holds the directory's lock."""
    try:
        descriptor = os.open(state.lock_file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def secret(state: StateDir) -> str:
    """The HMAC secret under which keys are stored: 64 hex digits, made the first time it is asked for."""
    try:
        text = state.secret_file.read_text().strip()
    except FileNotFoundError:
        text = secrets.token_hex(32)
        write_private(state.secret_file, text + "\n")
        return text
    if len(text) < 32 or any(c not in "0123456789abcdef" for c in text):
        raise StateBroken(
            f"{state.secret_file} doesn't hold 64 hex digits; bring the file back, or delete it and make new keys:"
            " keys made under another secret are void"
        )
    return text


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step; only its owner may read it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    fresh.replace(path)


def rotate(log: Path, limit_bytes: int = LOG_LIMIT_BYTES) -> None:
    """Set a log aside as `….log.1` when it has grown past the limit; the one before that is dropped."""
    if log.exists() and log.stat().st_size > limit_bytes:
        log.replace(log.with_name(log.name + ".1"))


def last_lines(log: Path, count: int = 8) -> tuple[str, ...]:
    """The end of a log, for a message to a person."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16_384))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-count:]
