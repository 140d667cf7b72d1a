"""A model shared by two ranks: the numbers of one, up to the order of adding; and all die with one."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engine_world import Transcript, make_sequence, run, write_model

from wire.settings import Settings
from workers.engine.errors import EngineGone
from workers.engine.host import Died, EngineHost
from workers.engine.link import Config, Ready, Stepped
from workers.engine.make import config_of, make_engine, make_vocabulary

pytestmark = pytest.mark.timeout(600)
SEQUENCES = [
    make_sequence(ref, range(3, 20 + ref * 9), max_tokens=12, temperature=0.0, n=1 + ref % 2) for ref in range(4)
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), tie_word_embeddings=False, vocab_size=273)


def config(model_dir: Path, numerics: str) -> Config:
    return config_of(
        Settings(
            model_dir=model_dir,
            engine_device="reference",
            engine_slots=4,
            engine_threads=1,
            context_tokens=96,
            numerics=numerics,
        )
    )


async def ready(host: EngineHost) -> Ready:
    await host.start()
    return await host.ready()


def ranks_of(host: EngineHost) -> list[psutil.Process]:
    """The processes below the engine's."""
    return psutil.Process(host.pid).children()


async def test_two_ranks_say_what_one_says(model_dir: Path) -> None:
    """Greedy, on random weights, whose likeliest tokens are far apart; a vocabulary that two can't share evenly."""
    alone = config(model_dir, "bf16")
    expected = run(make_engine(alone, make_vocabulary(alone)), *SEQUENCES)
    host, transcript = EngineHost(config(model_dir, "bf16-tp2")), Transcript()
    try:
        assert (await ready(host)).fingerprint.startswith("bf16-tp2-")
        (other,) = ranks_of(host)
        for sequence in SEQUENCES:
            host.add(sequence)
        async for event in host.events():
            assert isinstance(event, Stepped)
            transcript.take(event.emissions)
            host.applied(event.number)
            if len(transcript.choices) == len(expected) and all(told.over for told in transcript.choices.values()):
                break
    finally:
        await host.stop()
    assert {at: told.ids for at, told in transcript.choices.items()} == {at: told.ids for at, told in expected.items()}
    gone(other)


@pytest.mark.parametrize("busy", [False, True])
async def test_when_a_rank_dies_the_engine_dies_and_can_be_started_again(model_dir: Path, busy: bool) -> None:
    host = EngineHost(config(model_dir, "int8-tp2"))
    try:
        await ready(host)
        if busy:
            host.add(make_sequence(1, max_tokens=60, ignore_eos=True))
        ranks_of(host)[0].send_signal(signal.SIGKILL)
        async for event in host.events():
            if isinstance(event, Died):
                break
        assert event.status == 1
        await host.restart()
        assert isinstance(await host.ready(), Ready)
    finally:
        await host.stop()


async def test_when_the_engine_dies_its_ranks_die(model_dir: Path) -> None:
    host = EngineHost(config(model_dir, "bf16-tp2"))
    try:
        await ready(host)
        (other,) = ranks_of(host)
        psutil.Process(host.pid).kill()
        gone(other)
    finally:
        await host.stop()


async def test_ranks_that_cannot_share_the_model_end_the_start_with_a_sentence(model_dir: Path) -> None:
    host = EngineHost(config(model_dir, "bf16-tp3"))
    await host.start()
    with pytest.raises(EngineGone, match="3 ranks can't share the model's 2 key heads"):
        await host.ready()
    await host.stop()


def test_called_by_hand_a_rank_says_what_to_run() -> None:
    called = subprocess.run(
        [sys.executable, "-m", "workers.engine.gpu.follow"], capture_output=True, text=True, check=False
    )
    assert called.returncode == 2
    assert "python -m workers" in called.stderr
    assert "Traceback" not in called.stderr


def gone(process: psutil.Process) -> None:
    """It has ended, or does now."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.wait(timeout=60)
    assert not process.is_running()
