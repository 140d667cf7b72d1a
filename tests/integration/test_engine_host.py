"""The engine in its own process: started, told, killed, restarted; and what its modules import."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from engine_world import Transcript, make_sequence, run, write_model, write_tokenizer

from wire.settings import Settings
from workers.engine.child import Child
from workers.engine.errors import EngineGone
from workers.engine.host import Died, EngineHost, Event
from workers.engine.link import Add, Frames, Ready, Report, Running, Stepped, Stop, Taking, frame
from workers.engine.make import config_of, make_engine, make_vocabulary
from workers.engine.protocol import Key

pytestmark = pytest.mark.timeout(300)
SIMULATED = config_of(Settings(engine_kind="simulated", engine_slots=4, simulated_ttft_ms=0, simulated_tbt_ms=0))


@pytest.fixture
async def host() -> AsyncIterator[EngineHost]:
    async with running(EngineHost(SIMULATED)) as host:
        yield host


@contextlib.asynccontextmanager
async def running(host: EngineHost) -> AsyncIterator[EngineHost]:
    await host.start()
    try:
        await host.ready()
        yield host
    finally:
        await host.stop()


async def event(host: EngineHost) -> Event:
    return await anext(host.events())


async def until_over(host: EngineHost, transcript: Transcript, choices: int) -> None:
    """Take what the engine says until so many choices have ended, and let it go on."""
    while sum(told.over for told in transcript.choices.values()) < choices:
        step = await event(host)
        assert isinstance(step, Stepped)
        transcript.take(step.emissions)
        host.applied(step.number)


async def test_it_says_what_it_is_and_runs_what_it_is_given(host: EngineHost) -> None:
    sequences = [make_sequence(ref, max_tokens=20, n=1 + ref % 2, logprobs=2) for ref in range(8)]
    transcript = Transcript()
    for sequence in sequences:
        host.add(sequence)
    await until_over(host, transcript, 12)
    assert dict(transcript.choices) == run(make_engine(SIMULATED, make_vocabulary(SIMULATED)), *sequences)


async def test_ready_tells_the_numerics_class_and_the_room() -> None:
    host = EngineHost(SIMULATED)
    await host.start()
    ready = await host.ready()
    assert (ready.fingerprint, ready.context_tokens, ready.load.slots) == ("sim-1", 2048, 4)
    assert ready.vocab_size == make_vocabulary(SIMULATED).vocab_size
    await host.stop()


async def test_steps_are_numbered_and_it_waits_when_the_log_does_not_follow(host: EngineHost) -> None:
    host.add(make_sequence(1, max_tokens=500, ignore_eos=True))
    numbers = []
    for _ in range(64):
        step = await event(host)
        assert isinstance(step, Stepped)
        numbers.append(step.number)
    assert numbers == list(range(1, 65))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(event(host), 0.2)
    host.applied(1)
    step = await event(host)
    assert isinstance(step, Stepped)
    assert step.number == 65
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(event(host), 0.2)


async def test_commands_are_obeyed_while_it_waits_for_the_log(host: EngineHost) -> None:
    host.add(make_sequence(1, max_tokens=500, ignore_eos=True))
    for _ in range(64):
        await event(host)
    host.cancel(Key(0, 1, 1))
    host.add(make_sequence(2, max_tokens=3, ignore_eos=True))
    host.applied(64)
    transcript = Transcript()
    await until_over(host, transcript, 1)
    assert list(transcript.choices) == [(2, 0)]


async def test_a_dropped_epoch_is_forgotten(host: EngineHost) -> None:
    for ref, epoch in ((1, 1), (2, 2)):
        host.add(make_sequence(ref, max_tokens=500, ignore_eos=True, key=Key(0, epoch, ref)))
    for _ in range(64):
        await event(host)
    host.drop(0, 1)
    host.applied(64)
    for _ in range(64):
        step = await event(host)
        assert isinstance(step, Stepped)
        assert [emission.key.ref for emission in step.emissions] == [2]
        assert step.load.running == 1


async def test_a_kill_is_told_after_all_it_said_and_nothing_restarts_by_itself(host: EngineHost) -> None:
    host.add(make_sequence(1, max_tokens=500, ignore_eos=True))
    await event(host)
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    while isinstance(last := await event(host), Stepped):
        pass
    assert last == Died(status=-signal.SIGKILL, last_words="", suspects=(Key(0, 1, 1),))
    host.add(make_sequence(2))  # said to nobody
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(event(host), 0.2)
    await host.restart()
    assert isinstance(await event(host), Ready)
    transcript = Transcript()
    host.add(make_sequence(3, max_tokens=2, ignore_eos=True))
    await until_over(host, transcript, 1)
    assert list(transcript.choices) == [(3, 0)]


async def test_a_death_names_what_ran_and_not_what_waited(host: EngineHost) -> None:
    for ref, batch in ((1, True), (2, True), (3, False), (4, False), (5, False), (6, False)):
        host.add(make_sequence(ref, max_tokens=2_000, ignore_eos=True, batch=batch))
    spoke: set[int] = set()
    while not {3, 4, 5, 6} <= spoke:
        step = await event(host)
        assert isinstance(step, Stepped)
        spoke |= {emission.key.ref for emission in step.emissions}
        host.applied(step.number)
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    while isinstance(last := await event(host), Stepped):
        pass
    assert isinstance(last, Died)
    assert {key.ref for key in last.suspects} == {3, 4, 5, 6}, "batch had made room"
    await host.restart()
    await host.ready()
    os.kill(host.pid, signal.SIGKILL)
    last = await event(host)
    assert isinstance(last, Died)
    assert last.suspects == (), "another life ran nothing"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_sigterm_ends_it_cleanly_and_sigint_is_the_parents(signum: signal.Signals) -> None:
    async with running(EngineHost(SIMULATED)) as host:
        assert host.pid is not None
        os.kill(host.pid, signum)
        if signum == signal.SIGTERM:
            assert await event(host) == Died(status=0, last_words="")
        else:
            host.add(make_sequence(1, max_tokens=1))
            assert isinstance(await event(host), Stepped)


async def test_stopping_ends_the_process(host: EngineHost) -> None:
    pid = host.pid
    assert pid is not None
    host.add(make_sequence(1, max_tokens=500, ignore_eos=True))
    await host.stop()
    assert host.pid is None
    assert not psutil.pid_exists(pid)
    await host.stop()


async def test_an_engine_that_does_not_stop_is_killed() -> None:
    host = EngineHost(SIMULATED)
    await host.start()
    await host.ready()
    pid = host.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await host.stop(grace_s=0.1)
    assert not psutil.pid_exists(pid)


async def test_an_engine_that_cannot_start_says_why() -> None:
    host = EngineHost(config_of(Settings(engine_kind="torch", model_dir=Path("/nowhere"))))
    await host.start()
    with pytest.raises(EngineGone, match=r"/nowhere/tokenizer\.json is missing"):
        await host.ready()
    await host.stop()


def test_the_engine_dies_with_its_parent() -> None:
    script = """
import asyncio, os, signal, sys
from wire.settings import Settings
from workers.engine.host import EngineHost
from workers.engine.make import config_of

async def main():
    host = EngineHost(config_of(Settings(engine_kind="simulated")))
    await host.start()
    await host.ready()
    print(host.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    parent = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert parent.returncode == -signal.SIGKILL
    pid = int(parent.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=60)
    assert not psutil.pid_exists(pid)


def test_called_by_hand_it_says_what_to_run() -> None:
    called = subprocess.run([sys.executable, "-m", "workers.engine"], capture_output=True, text=True, check=False)
    assert called.returncode == 2
    assert "python -m workers" in called.stderr
    assert "Traceback" not in called.stderr


async def test_a_torch_engine_runs_behind_the_same_border(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    config = config_of(Settings(engine_kind="torch", model_dir=directory, engine_slots=2, context_tokens=96))
    sequences = [make_sequence(ref, max_tokens=6) for ref in range(3)]
    transcript = Transcript()
    async with running(EngineHost(config)) as host:
        for sequence in sequences:
            host.add(sequence)
        await until_over(host, transcript, 3)
    assert dict(transcript.choices) == run(make_engine(config, make_vocabulary(config)), *sequences)


def test_what_the_io_process_needs_imports_no_torch(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    script = f"""
import sys
from pathlib import Path
from wire.settings import Settings
from workers.engine import host, link, make, scheduler, simulated, text, tokenizer
for kind in ("simulated", "torch"):
    config = make.config_of(Settings(engine_kind=kind, model_dir=Path({str(tmp_path)!r})))
    make.make_vocabulary(config).encode_chat([{{"role": "user", "content": "hello"}}])
make.make_engine(make.config_of(Settings(engine_kind="simulated")), simulated.SimulatedVocabulary()).step()
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "transformers", "numpy"}}))
"""
    ran = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_it_says_whom_it_takes_on_and_who_runs_before_it_does() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = Child(theirs)
        serving = threading.Thread(target=child.serve)
        serving.start()
        ours.sendall(frame(SIMULATED))
        for ref in range(5):
            ours.sendall(frame(Add(sequence=make_sequence(ref, max_tokens=1, ignore_eos=True))))
        reports, frames = list[Report](), Frames()
        while sum(len(r.emissions) for r in reports if isinstance(r, Stepped)) < 5:
            frames.feed(ours.recv(1 << 16))
            reports += frames.reports()
        ours.sendall(frame(Stop()))
        serving.join()
    named: set[int] = set()
    for report in reports:
        match report:
            case Taking(key=key):
                assert key.ref not in named
            case Running(keys=keys):
                named |= {key.ref for key in keys}
            case Stepped(emissions=emissions):
                assert {emission.key.ref for emission in emissions} <= named
    assert named == set(range(5))
    assert sum(isinstance(report, Taking) for report in reports) == 5


def test_messages_come_whole_however_the_bytes_are_cut() -> None:
    said = [make_sequence(ref, range(3, 3 + ref * 50)) for ref in range(4)]
    data = b"".join(frame(Add(sequence=sequence)) for sequence in said) + frame(Stop())
    for size in (1, 3, 7, 64, len(data)):
        frames, heard = Frames(), []
        for begin in range(0, len(data), size):
            frames.feed(data[begin : begin + size])
            heard += frames.commands()
        assert heard == [*(Add(sequence=sequence) for sequence in said), Stop()]
