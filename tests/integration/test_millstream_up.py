"""The whole stack on this machine, with the simulated engine: its life, its verbs, its failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from stack import ROOT, Handle, millstream, running_stack, wait_for

from millstream import errors, runfile
from millstream.runfile import alive
from millstream.state import StateDir, is_running

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]
ANY_PORTS = ("--port", "0", "--kafka-port", "0", "--clickhouse-port", "0")
CHILDREN = {"kafka", "clickhouse", "ingress", "worker-0", "control", "ledger"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with running_stack("simulated", tmp_path_factory.mktemp("up")) as handle:
        yield handle


def models_status(stack: Handle, key: str) -> int:
    return httpx.get(stack.base_url + "/models", headers={"Authorization": f"Bearer {key}"}).status_code


class TestRunning:
    def test_run_json_says_what_runs(self, stack: Handle) -> None:
        assert set(stack.pids()) == CHILDREN
        assert all(alive(child.pid, child.created_s) and child.state == "ready" for child in stack.run.children)
        assert stack.run.state == "ready"

    def test_secrets_are_private(self, stack: Handle) -> None:
        for file in (stack.state.key_file, stack.state.secret_file, stack.state.run_file):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def test_no_log_holds_the_key(self, stack: Handle) -> None:
        for log in stack.state.logs.iterdir():
            assert stack.key not in log.read_text(errors="replace")

    def test_chat_streams_an_answer_and_the_bill_and_the_ledger_have_it(self, stack: Handle) -> None:
        said, tenant = "a question that no log may hold", "asks-twice"
        key = stack.command("keys", "create", "--tenant", tenant).stdout.strip()
        wait_for(lambda: models_status(stack, key) == 200, "the key is known")
        chat = ("chat", said, "--max-tokens", "6", "--seed", "7", "--key", key)
        asked = stack.command(*chat, "--usage")
        assert asked.returncode == 0, asked.stderr
        assert len(asked.stdout.split()) > 1
        assert asked.stdout == stack.command(*chat).stdout
        assert ", 6 completion tokens" in asked.stderr
        both = f"SELECT count() AS n FROM ledger WHERE tenant = '{tenant}'"
        wait_for(lambda: stack.sql(both)[0]["n"] in (2, "2"), "both are in the ledger")
        bill = json.loads(stack.command("bill", "--tenant", tenant, "--json").stdout)
        assert bill["total"]["completion_tokens"] == 12
        assert "simulated" in stack.command("bill", "--tenant", tenant).stdout
        verified = stack.verify()
        assert verified.returncode == 0, verified.stdout + verified.stderr
        for log in stack.state.logs.iterdir():
            assert said not in log.read_text(errors="replace")

    def test_chat_says_what_the_api_says(self, stack: Handle) -> None:
        for argv, code in ((["--model", "nobody"], "404"), (["--key", "sk-ms-0-0"], "401")):
            done = stack.command("chat", "x", *argv)
            assert done.returncode == errors.Refused.exit_code
            assert done.stderr.startswith(f"millstream: the API answers {code}: ")

    def test_status_is_healthy_and_complete(self, stack: Handle) -> None:
        wait_for(lambda: stack.command("status").returncode == 0, "the stack is healthy")
        report = json.loads(stack.command("status", "--json").stdout)
        assert {process["name"] for process in report["processes"]} == CHILDREN
        assert [engine["name"] for engine in report["engines"]] == ["engine-0"]
        assert report["engines"][0]["weight"] == 1.0
        assert [queue["records"] for queue in report["queues"]] == [0]
        assert report["storage_bytes"]["kafka"] > 0
        assert "worker-0" in stack.command("status").stdout

    def test_choices_say_where_requests_went_and_why(self, stack: Handle) -> None:
        body = {"model": stack.model, "messages": [{"role": "user", "content": "where to?"}], "max_tokens": 2}
        answer = httpx.post(stack.base_url + "/chat/completions", headers=stack.headers, json=body)
        assert answer.status_code == 200
        name = answer.headers["x-request-id"]
        wait_for(lambda: stack.command("choices", name).returncode == 0, "the choice is in the log")
        (one,) = json.loads(stack.command("choices", name, "--json").stdout)
        assert one["request_id"] == name.removeprefix("req_")
        assert (one["attempt"], one["ingress"], one["alike"], one["regret"]) == (1, "local/0", True, 0.0)
        assert one["snapshot_version"] is not None
        assert one["why"]
        candidates = [(each["engine"], each["chosen"], each["weight"]) for each in one["candidates"]]
        assert candidates == [("engine-0", True, 1.0)]
        shown = stack.command("choices", answer.json()["id"]).stdout
        assert f"{one['request_id']}, attempt 1: {stack.model}" in shown
        assert "where to?" not in shown

        (summary,) = json.loads(stack.command("choices", "--json", "--last", "1h").stdout)
        assert summary["model"] == stack.model
        assert summary["decisions"] == sum(summary["reasons"].values()) >= 1
        assert summary["alike"] is not None
        assert stack.model in stack.command("choices").stdout

        for unknown in ("nobody", "0198f2c4-5a3e-7b21-9c7d-1f2e3d4c5b6a"):
            done = stack.command("choices", unknown)
            assert done.returncode == errors.FAILED
            said = f"millstream: no choice about a request '{unknown}' is in the log, which keeps them for an hour"
            assert done.stderr.startswith(said)
            assert len(done.stderr.splitlines()) == 1

    def test_a_query_cannot_change_anything_unless_told_to(self, stack: Handle) -> None:
        assert stack.command("sql", "SELECT 1 + 1", "--format", "TabSeparated").stdout == "2\n"
        assert "└" in stack.command("sql", "SELECT 1").stdout
        refused = stack.command("sql", "CREATE TABLE mine (x Int8) ENGINE = MergeTree ORDER BY x")
        assert refused.returncode == errors.Refused.exit_code
        assert "--write" in refused.stderr
        wrong = stack.command("sql", "SELECT nonsense")
        assert wrong.returncode == errors.Refused.exit_code
        assert "nonsense" in wrong.stderr
        assert "Traceback" not in wrong.stderr

    def test_keys_are_made_listed_and_revoked(self, stack: Handle) -> None:
        made = stack.command("keys", "create", "--tenant", "acme", "--name", "ci", "--concurrent", "3")
        key = made.stdout.strip()
        wait_for(lambda: models_status(stack, key) == 200, "the key is known")
        listed = {one["key_id"]: one for one in json.loads(stack.command("keys", "list", "--json").stdout)}
        key_id = key.split("-")[2]
        assert listed[key_id]["tenant"] == "acme"
        assert listed[key_id]["limits"]["concurrent"] == 3
        assert key not in json.dumps(listed)
        assert stack.command("keys", "revoke", key_id).returncode == 0
        wait_for(lambda: models_status(stack, key) == 401, "the key is void")
        assert "revoked" in stack.command("keys", "list").stdout
        unknown = stack.command("keys", "revoke", "nobody")
        assert unknown.returncode == errors.FAILED
        assert "there is no key" in unknown.stderr

    def test_a_second_stack_on_the_directory_is_refused(self, stack: Handle) -> None:
        before = stack.pids()
        for detach in ([], ["--detach"]):
            done = stack.command("up", *detach, "--port", "0")
            assert done.returncode == errors.AlreadyRunning.exit_code
        assert stack.pids() == before

    @pytest.mark.parametrize("name", sorted(CHILDREN))
    def test_a_killed_process_is_started_again(self, stack: Handle, name: str) -> None:
        old = stack.kill(name)
        stack.wait_restarted(name, old)
        stack.wait_ready()
        assert stack.child(name).restarts >= 1
        asked = stack.command("chat", "still there?", "--max-tokens", "4")
        assert asked.returncode == 0, asked.stderr


def test_a_stack_comes_back_with_what_it_had(tmp_path: Path) -> None:
    with running_stack("simulated", tmp_path) as stack:
        key, first = stack.key, stack.pids()
        assert stack.command("chat", "remember", "--max-tokens", "4").returncode == 0
    assert not any(alive(pid, None) for pid in first.values())
    assert not stack.state.run_file.exists()
    with running_stack("simulated", tmp_path) as stack:
        assert stack.key == key
        assert stack.command("chat", "again", "--max-tokens", "4").returncode == 0
        wait_for(lambda: stack.sql("SELECT count() AS n FROM ledger")[0]["n"] in (2, "2"), "both are in the ledger")
        assert stack.verify().returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel ends children with their parent")
def test_a_killed_supervisor_leaves_nothing_and_the_next_start_works(tmp_path: Path) -> None:
    with running_stack("simulated", tmp_path) as stack:
        pids, key = [*stack.pids().values(), *stack.engine_pids()], stack.key
        os.kill(stack.run.pid, signal.SIGKILL)
        wait_for(lambda: not any(alive(pid, None) for pid in pids), "all are gone")
        assert stack.state.run_file.exists()
        assert millstream("status", state=stack.state.path).returncode == errors.NotRunning.exit_code
        with running_stack("simulated", tmp_path) as next_one:
            assert next_one.key == key
            assert next_one.command("chat", "again", "--max-tokens", "4").returncode == 0


def test_a_stack_whose_directory_is_deleted_ends(tmp_path: Path) -> None:
    with running_stack("simulated", tmp_path) as stack:
        pids = [stack.run.pid, *stack.pids().values(), *stack.engine_pids()]
        shutil.rmtree(stack.state.path, ignore_errors=True)
        wait_for(lambda: not any(alive(pid, None) for pid in pids), "all are gone")
        assert not stack.state.path.exists()


def foreign_log(directory: Path) -> StateDir:
    """A state directory with the log of another broker in it: Kafka itself refuses to start on it."""
    state = StateDir.at(directory / "state")
    (state.kafka / "data").mkdir(parents=True)
    state.layout_file.write_text("1\n")
    meta = "version=1\ncluster.id=MkU3OEVBNTcwNTJENDM2Qg\nnode.id=7\n"
    (state.kafka / "data" / "meta.properties").write_text(meta)
    return state


@pytest.mark.parametrize("detach", [[], ["--detach"]], ids=["attached", "detached"])
def test_a_process_that_cannot_start_fails_the_start_and_leaves_nothing(tmp_path: Path, detach: list[str]) -> None:
    state = foreign_log(tmp_path)
    done = millstream("up", *detach, "--engine", "simulated", *ANY_PORTS, state=state.path, timeout_s=200)
    assert done.returncode == errors.StartFailed.exit_code, done.stderr
    assert "millstream: kafka ends at once" in done.stderr
    assert "node id" in done.stderr
    assert str(state.log("kafka")) in done.stderr
    assert not is_running(state)
    assert not state.run_file.exists()


def test_a_broken_log_is_named(tmp_path: Path) -> None:
    state = foreign_log(tmp_path)
    (state.kafka / "data" / "meta.properties").write_text("nonsense")
    done = millstream("up", "--engine", "simulated", *ANY_PORTS, state=state.path)
    assert done.returncode == errors.StartFailed.exit_code
    assert "Kafka's data directory is broken" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_during_the_start_stops_everything(tmp_path: Path) -> None:
    state = StateDir.at(tmp_path / "state")
    argv = [sys.executable, "-m", "millstream", "up", "--state", str(state.path), "--engine", "simulated", *ANY_PORTS]
    with subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as up:
        pids = wait_for(lambda: started(state), "something runs")
        time.sleep(0.1)
        up.send_signal(signal.SIGINT)
        _, told = up.communicate(timeout=60)
    assert up.returncode == errors.StartFailed.exit_code
    assert "stopped before it was ready" in told
    assert not any(alive(pid, None) for pid in pids)
    assert not state.run_file.exists()


def started(state: StateDir) -> list[int]:
    run = runfile.read(state)
    return [] if run is None else [child.pid for child in run.children if child.pid is not None]
