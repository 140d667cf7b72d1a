"""The supervisor with real, small processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from stack import wait_for

from millstream.errors import StartFailed
from millstream.ports import free_port
from millstream.runfile import ChildState, alive
from millstream.state import last_lines
from millstream.supervise import TRIES, Child, Probe, Supervisor, Watch, backoff_s

SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def child(name: str, code: str, *, ready_within_s: float = 30.0, stop_within_s: float = 20.0) -> Child:
    argv = (sys.executable, "-c", code)
    return Child(name=name, argv=argv, env=dict(os.environ), ready_within_s=ready_within_s, stop_within_s=stop_within_s)


LISTEN = (
    "import socket, sys, time;"
    "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1);"
    "s.bind(('127.0.0.1', {port})); s.listen(); time.sleep(600)"
)


async def at_once(_since_ms: int) -> bool:
    return True


async def never(_since_ms: int) -> bool:
    return False


def says_up(log: Path) -> Probe:
    async def probe(_since_ms: int) -> bool:
        return any("up" in line for line in last_lines(log))

    return probe


class World:
    def __init__(self, directory: Path) -> None:
        self.seen: list[ChildState] = []
        self.supervisor = Supervisor(lambda name: directory / f"{name}.log", self._changed)
        self.hurry = asyncio.Event()

    def _changed(self) -> None:
        self.seen += [run.state for run in self.supervisor.described()]

    async def stop(self, *order: frozenset[str]) -> None:
        await self.supervisor.stop(order, self.hurry)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    made.hurry.set()
    await made.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def pid_of(watch: Watch) -> int:
    pid = watch.described().pid
    assert pid is not None
    return pid


async def test_a_child_becomes_ready_and_is_described(world: World) -> None:
    watch = world.supervisor.start(child("calm", SLEEP), at_once)
    await watch.ready()
    described = watch.described()
    assert described.state == "ready"
    assert alive(described.pid, described.created_s)
    assert described.restarts == 0


async def test_a_killed_child_is_started_again_at_once(world: World) -> None:
    watch = world.supervisor.start(child("killed", SLEEP), at_once)
    await watch.ready()
    first = pid_of(watch)
    os.kill(first, signal.SIGKILL)
    await until(lambda: watch.described().pid not in (None, first) and watch.state == "ready")
    assert watch.restarts == 1


def test_only_deaths_in_a_row_are_waited_for() -> None:
    assert [backoff_s(deaths) for deaths in (1, 2, 3, 4, 5, 6, 7, 50)] == [0, 0.5, 1, 2, 4, 8, 10, 10]


async def test_a_child_that_cannot_start_is_given_up_with_its_last_words(world: World) -> None:
    watch = world.supervisor.start(child("broken", "print('no disk left'); raise SystemExit(3)"), never)
    with pytest.raises(StartFailed, match=rf"(?s)broken ends at once, exit code 3, tried {TRIES} times.*no disk left"):
        await watch.ready()


async def test_a_child_whose_program_is_missing_is_given_up(world: World) -> None:
    gone = Child(name="gone", argv=("/no/such/program",), env={}, ready_within_s=5, stop_within_s=5)
    with pytest.raises(StartFailed, match=r"gone ends at once, can't be started: .*/no/such/program"):
        await world.supervisor.start(gone, at_once).ready()


async def test_a_child_that_never_gets_ready_is_given_up(world: World) -> None:
    watch = world.supervisor.start(child("mute", SLEEP, ready_within_s=0.2), never)
    with pytest.raises(StartFailed, match="mute isn't ready after 0 s"):
        await watch.ready()


async def test_a_child_that_was_ready_once_is_tried_for_ever(world: World, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = f"import os, sys, time; sys.exit(1) if os.path.exists({str(flag)!r}) else time.sleep(600)"
    watch = world.supervisor.start(child("later", code), at_once)
    await watch.ready()
    flag.touch()
    os.kill(pid_of(watch), signal.SIGKILL)
    await until(lambda: watch.restarts > TRIES)
    flag.unlink()
    await until(lambda: watch.state == "ready" and watch.described().pid is not None)


async def test_stopping_goes_stage_by_stage(world: World, tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = textwrap.dedent(
        """
        import signal, sys, time
        def end(*_):
            open({order!r}, "a").write({name!r} + "\\n")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        print("up", flush=True)
        time.sleep(600)
        """
    )
    for name in ("last", "first", "second"):
        watch = world.supervisor.start(
            child(name, code.format(order=str(order), name=name)),
            says_up(tmp_path / f"{name}.log"),
        )
        await watch.ready()
    await world.stop(frozenset({"first"}), frozenset({"second", "not started"}))
    assert order.read_text().split() == ["first", "second", "last"]
    assert all(run.state == "stopped" and run.pid is None for run in world.supervisor.described())


@pytest.mark.parametrize("hurried", [False, True])
async def test_a_child_that_ignores_sigterm_is_killed(world: World, tmp_path: Path, hurried: bool) -> None:
    limit_s = 600.0 if hurried else 0.1
    watch = world.supervisor.start(
        child("stubborn", STUBBORN, stop_within_s=limit_s),
        says_up(tmp_path / "stubborn.log"),
    )
    await watch.ready()
    pid = pid_of(watch)
    if hurried:
        world.hurry.set()
    await world.stop()
    assert not psutil.pid_exists(pid)


async def test_what_a_dead_child_leaves_in_its_group_is_killed(world: World, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time;"
        f"print('up', subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "parent.log"
    watch = world.supervisor.start(child("parent", code), says_up(log))
    await watch.ready()
    grandchild = int(log.read_text().split()[1])
    assert alive(grandchild, None)
    os.kill(pid_of(watch), signal.SIGKILL)
    await until(lambda: not alive(grandchild, None))


def answers(port: int) -> Probe:
    """Whoever listens there."""

    async def probe(_since_ms: int) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    return probe


@pytest.fixture
def strangers_port() -> Iterator[int]:
    """A port that a process which isn't ours listens on, and answers."""
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        yield stranger.getsockname()[1]


class TestPort:
    async def test_a_stranger_that_answers_there_is_not_the_child(self, world: World, strangers_port: int) -> None:
        mine = replace(child("loser", LISTEN.format(port=strangers_port)), port=strangers_port)
        watch = world.supervisor.start(mine, answers(strangers_port))
        with pytest.raises(StartFailed, match=rf"(?s)loser ends at once, exit code 1, tried {TRIES} times.*in use"):
            await watch.ready()
        assert "ready" not in world.seen

    async def test_a_child_that_lives_but_listens_elsewhere_is_not_ready(
        self, world: World, strangers_port: int
    ) -> None:
        mine = replace(child("deaf", SLEEP, ready_within_s=1.0), port=strangers_port)
        with pytest.raises(StartFailed, match="deaf isn't ready after 1 s"):
            await world.supervisor.start(mine, answers(strangers_port)).ready()

    @pytest.mark.parametrize("below", [False, True], ids=["itself", "a process below it"])
    async def test_a_child_that_listens_there_is_ready(self, world: World, below: bool) -> None:
        port = free_port()
        code = LISTEN.format(port=port)
        if below:
            code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
        watch = world.supervisor.start(replace(child("owner", code), port=port), answers(port))
        await watch.ready()
        assert watch.state == "ready"

    async def test_of_two_on_one_port_one_is_ready_and_the_other_fails(self, world: World) -> None:
        port = free_port()
        code = LISTEN.format(port=port)
        watches = [
            world.supervisor.start(replace(child(name, code), port=port), answers(port)) for name in ("one", "two")
        ]
        ends = await asyncio.gather(*(watch.ready() for watch in watches), return_exceptions=True)
        assert sorted(type(end).__name__ for end in ends) == ["NoneType", "StartFailed"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel ends children with their parent")
def test_children_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "orphan.log"
    code = textwrap.dedent(
        f"""
        import asyncio, os, sys
        from pathlib import Path
        from millstream.supervise import Child, Supervisor
        async def ready(_): return True
        async def main():
            supervisor = Supervisor(lambda name: Path({str(log)!r}), lambda: None)
            argv = (sys.executable, "-c", {SLEEP!r})
            watch = supervisor.start(
                Child(name="orphan", argv=argv, env=dict(os.environ), ready_within_s=9, stop_within_s=9), ready
            )
            await watch.ready()
            print(watch.described().pid, flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        orphan = int(supervisor.stdout.readline())
        assert alive(orphan, None)
        supervisor.kill()
    wait_for(lambda: not alive(orphan, None), "the child is gone")
