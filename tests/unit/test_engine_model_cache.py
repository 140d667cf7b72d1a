"""The model's cache: made once, whole or not at all, and errors that say what to do."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from millstream import model
from millstream.model import ModelFailed, prepare
from millstream.wish import Say


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces fetching and converting, the two commands, by one that writes a file."""
    ran: list[str] = []

    def run(command: Sequence[str], failed: str, say: Say) -> None:
        ran.append(failed)
        if "millstream.convert" in command:
            Path(command[-1]).mkdir(parents=True)
            (Path(command[-1]) / "config.json").write_text("{}")

    monkeypatch.setattr(model, "run", run)
    return ran


def test_it_is_made_once_and_then_there(tmp_path: Path, steps: list[str]) -> None:
    said: list[str] = []
    made = prepare(tmp_path, said.append)
    assert (made / "config.json").is_file()
    assert len(steps) == len(said) == 2
    assert prepare(tmp_path, said.append) == made
    assert len(steps) == len(said) == 2


def test_what_a_killed_start_left_is_cleared_away(tmp_path: Path, steps: list[str]) -> None:
    left = tmp_path / "models" / ".making-x"
    left.mkdir(parents=True)
    prepare(tmp_path, print)
    assert not left.exists()
    assert [path.name for path in (tmp_path / "models").iterdir() if path.name.startswith(".making")] == []


def test_a_failure_leaves_nothing_and_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    whole = model._make

    def failing(scratch: Path, say: Say) -> Path:
        whole(scratch, say)
        raise ModelFailed("no network")

    monkeypatch.setattr(model, "_make", failing)
    with pytest.raises(ModelFailed):
        prepare(tmp_path, print)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]
    monkeypatch.setattr(model, "_make", whole)
    assert prepare(tmp_path, print).is_dir()


def test_a_second_start_waits_for_the_first(tmp_path: Path, steps: list[str]) -> None:
    (tmp_path / "models").mkdir()
    said: list[str] = []
    waits = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        waits.set()

    with (tmp_path / "models" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=prepare, args=(tmp_path, say))
        second.start()
        assert waits.wait(60)
        assert steps == []
    second.join(60)
    assert "Waiting" in said[0]
    assert len(steps) == 2


def test_no_room_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_NEEDED_BYTES", 10**18)
    with pytest.raises(ModelFailed, match=r"MB free and the model takes .* set XDG_CACHE_HOME"):
        prepare(tmp_path, print)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelFailed, match="can't be written"):
        prepare(tmp_path, print)


def test_a_failed_step_quotes_its_last_complaint_and_passes_its_lines_on() -> None:
    said: list[str] = []
    script = "import sys; print('half'); print('why\\n', file=sys.stderr); sys.exit(3)"
    with pytest.raises(ModelFailed, match="It failed: why"):
        model.run((sys.executable, "-c", script), "It failed", said.append)
    assert said == ["  half"]
    with pytest.raises(ModelFailed, match="It failed: exit status 3"):
        model.run((sys.executable, "-c", "import sys; sys.exit(3)"), "It failed", said.append)


def test_without_uv_and_pip_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model.shutil, "which", lambda name: None)
    monkeypatch.setattr(model.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 1))
    with pytest.raises(ModelFailed, match="ensurepip"):
        model._fetch_command(tmp_path)
