from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from millstream import runfile
from millstream.errors import AlreadyRunning, NotRunning, PortTaken, StateBroken
from millstream.ports import Claims, Wanted, free_port, settle
from millstream.runfile import ChildRun, Run, alive, created_s, remnants
from millstream.state import StateDir, is_running, last_lines, locked, open_state, rotate, secret, write_private


def a_run(state: StateDir, **changes: object) -> Run:
    fields: dict[str, object] = {
        "pid": os.getpid(),
        "created_s": created_s(os.getpid()),
        "state": "ready",
        "started_ms": 1_000,
        "port": 8080,
        "kafka_port": 9092,
        "clickhouse_port": 8123,
        "ledger_port": 9100,
        "region": "local",
        "model": "simulated",
        "engine_kind": "simulated",
        "state_dir": str(state.path),
        "versions": {},
        "slots": 8,
        **changes,
    }
    return Run(**fields)  # type: ignore[arg-type]


def test_a_state_directory_is_made_and_found_again(tmp_path: Path) -> None:
    made = open_state(tmp_path / "a" / "b")
    assert made.logs.is_dir()
    assert open_state(tmp_path / "a" / "b") == made


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("mine")
    with pytest.raises(StateBroken, match="state is a file; move it away, or name another directory with --state"):
        open_state(tmp_path / "state")
    assert (tmp_path / "state").read_text() == "mine"


def test_a_file_on_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("mine")
    with pytest.raises(StateBroken, match="Not a directory"):
        open_state(tmp_path / "state" / "below")


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StateBroken, match="holds files that aren't Millstream's"):
        open_state(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_another_layout_is_refused(tmp_path: Path) -> None:
    open_state(tmp_path / "state").layout_file.write_text("99")
    with pytest.raises(StateBroken, match="has layout '99', this Millstream needs 1"):
        open_state(tmp_path / "state")


def test_a_part_that_is_a_file_is_named(tmp_path: Path) -> None:
    state = open_state(tmp_path / "state")
    state.kafka.rmdir()
    state.kafka.touch()
    with pytest.raises(StateBroken, match=r"File exists: .*kafka"):
        open_state(tmp_path / "state")


def test_a_directory_that_cannot_be_written_is_named() -> None:
    # /proc takes no files, not even from root
    with pytest.raises(StateBroken, match=r"/proc/mine can't be used \(.*\); make it writable"):
        open_state(Path("/proc/mine"))


def test_one_lock_at_a_time(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    assert not is_running(state)
    with locked(state):
        assert is_running(state)
        with (
            pytest.raises(AlreadyRunning, match=r"a stack runs on .* already; stop it with `millstream down"),
            locked(state),
        ):
            pass
    assert not is_running(state)


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    code = (
        "import sys, time; from pathlib import Path; from millstream.state import StateDir, locked\n"
        "with locked(StateDir(Path(sys.argv[1]))): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert is_running(state)
        holder.kill()
    with locked(state):
        pass


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    first = secret(state)
    assert len(bytes.fromhex(first)) == 32
    assert secret(state) == first
    assert stat.S_IMODE(state.secret_file.stat().st_mode) == 0o600


@pytest.mark.parametrize("text", ["", "short", "g" * 64])
def test_a_broken_secret_is_not_replaced_silently(tmp_path: Path, text: str) -> None:
    state = open_state(tmp_path)
    state.secret_file.write_text(text)
    with pytest.raises(StateBroken, match="bring the file back"):
        secret(state)
    assert state.secret_file.read_text() == text


def test_private_files_are_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("old")
    file.chmod(0o644)
    write_private(file, "new")
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_log_is_set_aside_when_it_is_large(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("x" * 10)
    rotate(log, limit_bytes=10)
    assert log.exists()
    rotate(log, limit_bytes=9)
    assert not log.exists()
    assert (tmp_path / "a.log.1").read_text() == "x" * 10


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert last_lines(log) == ()
    log.write_text("".join(f"line {n}\n\n" for n in range(9000)))
    assert last_lines(log, 2) == ("line 8998", "line 8999")


def test_run_json_comes_back(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    child = ChildRun(name="kafka", state="ready", log="l", pid=os.getpid(), created_s=created_s(os.getpid()))
    run = a_run(state, children=(child,))
    runfile.write(state, run)
    assert runfile.read(state) == run
    assert run.base_url == "http://127.0.0.1:8080/v1"
    settings = run.settings("ab" * 32)
    assert settings.cluster.bootstrap == "127.0.0.1:9092"
    settings.check()
    assert remnants(run) == (child,)


def test_a_number_given_to_another_process_is_not_taken_for_ours() -> None:
    mine = created_s(os.getpid())
    assert mine is not None
    assert alive(os.getpid(), mine)
    assert not alive(os.getpid(), mine - 60)
    assert not alive(None, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}'])
def test_a_run_json_that_cannot_be_read_is_no_run(tmp_path: Path, text: str) -> None:
    state = open_state(tmp_path)
    state.run_file.write_text(text)
    assert runfile.read(state) is None


def test_without_a_supervisor_nothing_runs_whatever_run_json_says(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    runfile.write(state, a_run(state))
    with pytest.raises(NotRunning, match="start one with `millstream up`"):
        runfile.running(tmp_path)
    with locked(state):
        assert runfile.running(tmp_path).pid == os.getpid()


def test_a_taken_port_is_named_with_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            Claims() as claims,
            pytest.raises(PortTaken, match=rf"port {port}, wanted for Kafka, is in use; .* with --kafka-port"),
        ):
            settle([Wanted(0, "the API", "--port"), Wanted(port, "Kafka", "--kafka-port")], claims)


def test_a_port_wanted_twice_is_named() -> None:
    port = free_port()
    with Claims() as claims, pytest.raises(PortTaken, match=f"port {port} is wanted twice"):
        settle([Wanted(port, "the API", "--port"), Wanted(port, "Kafka", "--kafka-port")], claims)


def test_zero_means_any_port() -> None:
    with Claims() as claims:
        chosen = settle([Wanted(0, "a", "-a"), Wanted(0, "b", "-b")], claims)
    assert len(set(chosen)) == 2
    assert all(port > 0 for port in chosen)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")
def test_of_two_starts_at_the_same_moment_one_gets_a_port_until_it_ends() -> None:
    wanted = [Wanted(free_port(), "Kafka", "--kafka-port")]
    with Claims() as mine, Claims() as theirs:
        settle(wanted, mine)  # nothing listens there yet
        with pytest.raises(PortTaken, match="wanted for Kafka, is in use"):
            settle(wanted, theirs)
    with Claims() as later:
        settle(wanted, later)
