"""The command as a user meets it: what it says, and what it exits with."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from stack import millstream

from millstream import cli, errors
from millstream.state import locked, open_state


def every_command(group: click.Group, *above: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*above, name)
        if isinstance(command, click.Group):
            yield from every_command(command, *above, name)


@pytest.mark.parametrize("words", list(every_command(cli.cli)), ids=" ".join)
def test_every_command_explains_itself(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(cli.cli, [*words, "--help"])
    assert shown.exit_code == 0
    assert len(shown.output.splitlines()) > 3


def test_every_error_has_an_exit_code_of_its_own() -> None:
    codes = [kind.exit_code for kind in errors.StackError.__subclasses__()]
    assert len(set(codes)) == len(codes)
    assert min(codes) > 2


@pytest.mark.parametrize(
    "argv",
    [
        ["down"],
        ["status"],
        ["chat", "hello"],
        ["bill"],
        ["sql", "SELECT 1"],
        ["verify"],
        ["choices"],
        ["choices", "abc"],
        ["keys", "list"],
        ["keys", "create"],
        ["keys", "revoke", "abc"],
    ],
    ids=" ".join,
)
def test_without_a_stack_it_says_how_to_start_one(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.STATE_VARIABLE, str(tmp_path / "none"))
    assert exit_code(argv, monkeypatch) == errors.NotRunning.exit_code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("millstream: no stack runs on ")
    assert "`millstream up`" in shown.err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("detach", [[], ["--detach"]], ids=["attached", "detached"])
class TestUp:
    def test_a_taken_port_is_named_before_anything_starts(self, tmp_path: Path, detach: list[str]) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            done = millstream("up", *detach, "--port", "0", "--kafka-port", str(port), state=tmp_path / "state")
        assert done.returncode == errors.PortTaken.exit_code
        assert f"port {port}, wanted for Kafka, is in use" in done.stderr
        assert "--kafka-port" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "state" / "run.json").exists()
        assert not list((tmp_path / "state" / "kafka").iterdir())

    def test_a_file_in_place_of_the_state(self, tmp_path: Path, detach: list[str]) -> None:
        (tmp_path / "state").write_text("mine")
        done = millstream("up", *detach, state=tmp_path / "state")
        assert done.returncode == errors.StateBroken.exit_code
        assert "is a file; move it away" in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_second_one_is_told_of_the_first(self, tmp_path: Path, detach: list[str]) -> None:
        with locked(open_state(tmp_path / "state")):
            done = millstream("up", *detach, state=tmp_path / "state")
        assert done.returncode == errors.AlreadyRunning.exit_code
        assert "runs on" in done.stderr
        assert "millstream down" in done.stderr

    def test_without_java_it_says_how_to_install_it(self, tmp_path: Path, detach: list[str]) -> None:
        done = millstream("up", *detach, state=tmp_path / "state", environ={"PATH": str(tmp_path)})
        assert done.returncode == errors.Missing.exit_code
        assert "apt-get install openjdk-17-jre-headless" in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("MILLSTREAM_ENGINE_SLOTS", "many", "MILLSTREAM_ENGINE_SLOTS is 'many'; it must be a whole number"),
            ("MILLSTREAM_ENGIN_SLOTS", "4", "MILLSTREAM_ENGIN_SLOTS is no setting"),
            ("MILLSTREAM_PRICE_BOOK", "/no/book.toml", "the price book /no/book.toml can't be read"),
        ],
    )
    def test_a_wrong_setting_is_named(self, tmp_path: Path, detach: list[str], name: str, text: str, said: str) -> None:
        done = millstream("up", *detach, state=tmp_path / "state", environ={name: text})
        assert done.returncode == errors.FAILED
        assert said in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "argv", [["up", "--port", "x"], ["up", "--port", "70000"], ["up", "--engine", "gpu"], ["nonsense"], ["chat"]]
)
def test_wrong_options_exit_with_2_and_a_sentence(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(argv, monkeypatch) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["bill", "--month", "foo"],
        ["bill", "--month", "2026-13"],
        ["bill", "--month", ""],
        ["bill", "--tenant", "\udcff"],
        ["chat", ""],
        ["chat", " \n"],
        ["chat", "bad \udcff"],
        ["chat", "hi", "--temperature", "nan"],
        ["chat", "hi", "--key", "ü"],
        ["chat", "hi", "--seed", str(2**64)],
        ["choices", "--last", ""],
        ["choices", "--last", "5"],
        ["choices", "--last", "0s"],
        ["choices", "--last", "61m"],
        ["choices", "abc", "--last", "5m"],
        ["sql", ""],
        ["sql", "select '\udcff'"],
        ["up", "--state", ""],
        ["status", "--state", " "],
        ["keys", "create", "--tenant", ""],
        ["keys", "create", "--tenant", " \t"],
        ["keys", "create", "--project", ""],
        ["keys", "create", "--name", "a\x1b[2Jb"],
        ["keys", "create", "--name", "\udcff"],
        ["keys", "create", "--tenant", "x" * 201],
        ["keys", "create", "--requests-per-minute", "99999999999999999999"],
        ["keys", "create", "--tokens-per-minute", str(10**9 + 1)],
        ["keys", "create", "--concurrent", "0"],
    ],
    ids=lambda argv: ascii(" ".join(argv))[:60],
)
def test_a_wrong_value_exits_with_2_and_a_sentence(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(argv, monkeypatch) == 2
    assert "Error: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "sql"])
@pytest.mark.parametrize(("stdin", "said"), [(b"", "is empty"), (b" \n", "is empty"), (b"a \xff", "isn't UTF-8")])
def test_text_on_stdin_is_checked_too(command: str, stdin: bytes, said: str) -> None:
    shown = CliRunner().invoke(cli.cli, [command, "-"], input=stdin)
    assert shown.exit_code == 2
    assert said in shown.output


@pytest.mark.parametrize(
    "argv",
    [
        ["bill", "--month", "2026-01"],
        ["choices", "--last", "60m"],
        ["chat", "ü", "--temperature", "2", "--seed", "-1"],
        ["keys", "create", "--tenant", "Müller & Co", "--name", "x" * 200, "--requests-per-minute", str(10**9)],
    ],
    ids=" ".join,
)
def test_right_values_come_as_far_as_the_missing_stack(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cli.STATE_VARIABLE, str(tmp_path / "none"))
    assert exit_code(argv, monkeypatch) == errors.NotRunning.exit_code


def test_the_state_directory_comes_from_the_option_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cli.STATE_VARIABLE, str(tmp_path / "environment"))
    exit_code(["status"], monkeypatch)
    assert str(tmp_path / "environment") in capsys.readouterr().err
    exit_code(["status", "--state", str(tmp_path / "option")], monkeypatch)
    assert str(tmp_path / "option") in capsys.readouterr().err


def exit_code(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """What the entry point exits with."""
    monkeypatch.setattr(sys, "argv", ["millstream", *argv])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert isinstance(exited.value.code, int)
    return exited.value.code
