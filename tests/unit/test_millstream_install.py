"""What a stack must find in its log before it serves, in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned import a_stack

from millstream import install, keys
from millstream.errors import StartFailed
from millstream.observe import look
from millstream.stack import Stack
from millstream.state import StateDir, open_state, secret
from wire.clock import ManualClock
from wire.errors import Unavailable
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return open_state(tmp_path / "state")


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(MemoryLog(ManualClock()))


def planned_at(state: StateDir) -> Stack:
    return a_stack(state_dir=state.path, key_secret=secret(state))


async def test_filling_the_log_twice_changes_nothing(bus: MemoryBus, state: StateDir) -> None:
    whole = planned_at(state)
    assert not install.is_filled(whole, state)
    await install.fill_log(bus, whole, state)
    key, known = state.key_file.read_text(), await keys.read_all(bus)
    assert install.is_filled(whole, state)
    await install.fill_log(bus, whole, state)
    assert state.key_file.read_text() == key
    assert await keys.read_all(bus) == known
    assert set((await look(bus, now_ms=0)).models) == {"simulated"}


async def test_the_key_of_the_directory_is_taken_up_by_a_new_log(bus: MemoryBus, state: StateDir) -> None:
    await install.fill_log(bus, planned_at(state), state)
    key = state.key_file.read_text().strip()
    another = MemoryBus(MemoryLog(ManualClock()))
    await install.fill_log(another, planned_at(state), state)
    assert state.key_file.read_text().strip() == key
    (known,) = (await keys.read_all(another)).values()
    assert known.hmac == keys.digest(secret(state), key)


@pytest.mark.parametrize("harm", ["revoked", "deleted", "nonsense", "of another secret"])
async def test_a_key_that_is_void_is_replaced(bus: MemoryBus, state: StateDir, harm: str) -> None:
    await install.fill_log(bus, planned_at(state), state)
    old = state.key_file.read_text().strip()
    if harm == "revoked":
        (known,) = (await keys.read_all(bus)).values()
        await keys.publish(bus, keys.revoked(known, now_ms=5))
    elif harm == "deleted":
        state.key_file.unlink()
    elif harm == "nonsense":
        state.key_file.write_text("hello")
    else:
        state.secret_file.unlink()
    await install.fill_log(bus, planned_at(state), state)
    key = state.key_file.read_text().strip()
    assert key != old
    record = (await keys.read_all(bus))[keys.key_id_of(key) or ""]
    assert record.revoked_ms is None
    assert record.hmac == keys.digest(secret(state), key)


async def test_a_store_that_is_not_ready_yet_is_asked_again() -> None:
    asked = []

    async def work() -> None:
        asked.append(len(asked))
        if len(asked) < 3:
            raise Unavailable("the log can't be reached")

    await install.insist(work, "topics")
    assert asked == [0, 1, 2]


async def test_a_store_that_never_gets_ready_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_INSIST_FOR_S", 0.05)

    async def work() -> None:
        raise Unavailable("the log can't be reached")

    with pytest.raises(StartFailed, match="topics can't be made within 0 s: the log can't be reached"):
        await install.insist(work, "topics")
