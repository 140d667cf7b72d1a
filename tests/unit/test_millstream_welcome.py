"""What is printed to be pasted."""

from __future__ import annotations

import json
import re
import shlex
import stat
from pathlib import Path

import pytest
from planned import a_stack

from millstream import stack, welcome
from millstream.state import open_state, write_private

KEY = "sk-ms-0123456789ab-" + "0" * 48


def shown(directory: Path, *, detached: bool) -> str:
    state = open_state(directory)
    write_private(state.key_file, KEY + "\n")
    whole = a_stack(state_dir=state.path, port=8081, served=stack.smollm2())
    return welcome.ready_text(welcome.first_run(whole, 1), state, detached=detached)


def test_the_curl_is_whole(tmp_path: Path) -> None:
    text = shown(tmp_path / "a state", detached=False)
    command = re.search(r"curl .*?\n\n", text, re.S)
    assert command is not None
    words = shlex.split(command[0].replace("\\\n", " "))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8081/v1/chat/completions"]
    assert f"Authorization: Bearer {KEY}" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "SmolLM2-135M-Instruct"
    assert "Ctrl-C stops it." in text


def test_in_the_background_the_command_that_stops_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "millstream").touch()
    (bin_dir / "millstream").chmod(stat.S_IRWXU)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(bin_dir))
    assert "`millstream down` stops it." in shown(tmp_path / ".millstream", detached=True)
    assert f"`millstream down --state {tmp_path}/other` stops it." in shown(tmp_path / "other", detached=True)
    monkeypatch.setenv("PATH", "")
    assert "/millstream down` stops it." in shown(tmp_path / ".millstream", detached=True)
