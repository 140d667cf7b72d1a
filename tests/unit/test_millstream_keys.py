from __future__ import annotations

import hashlib
import hmac

import msgspec
import pytest

from millstream import keyring, keys
from wire import codec
from wire.clock import ManualClock
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog
from wire.messages import Credential, Limits
from wire.topics import CREDENTIALS, shared_topics

SECRET = "5e" * 32


def a_credential(key: str, created_ms: int = 1) -> Credential:
    return keys.credential(
        key, SECRET, tenant="t", project="p", name="n", now_ms=created_ms, limits=Limits(concurrent=2)
    )


def test_keys_are_long_random_and_carry_their_id() -> None:
    key = keys.new_key()
    assert key != keys.new_key()
    assert key.startswith(f"sk-ms-{keys.key_id_of(key)}-")
    assert len(key.rsplit("-", 1)[1]) * 4 == 192  # bits


@pytest.mark.parametrize(
    "text", ["", "sk-ms-", "sk-ms-zz-11", "sk-" + "a" * 48, f"sk-ms-{'0' * 12}-{'0' * 48}\n", "'; DROP TABLE"]
)
def test_what_is_no_key_has_no_id(text: str) -> None:
    assert keys.key_id_of(text) is None


def test_only_the_hmac_is_in_the_record() -> None:
    key = keys.new_key()
    record = a_credential(key)
    assert record.hmac == hmac.new(bytes.fromhex(SECRET), key.encode(), hashlib.sha256).hexdigest()
    assert key.rsplit("-", 1)[1].encode() not in codec.encode(record)


async def test_what_is_published_is_read_and_the_latest_wins() -> None:
    bus = MemoryBus(MemoryLog(ManualClock()))
    admin = await bus.admin()
    await admin.create(shared_topics())
    old, new = a_credential(keys.new_key(), 2), a_credential(keys.new_key(), 1)
    for record in (old, new, msgspec.structs.replace(old, revoked_ms=9)):
        await keys.publish(bus, record)
    found = await keys.read_all(bus)
    assert list(found) == [new.key_id, old.key_id]  # by age
    assert found[old.key_id].revoked_ms == 9
    assert found[new.key_id] == new


async def test_a_record_nobody_can_read_and_a_tombstone_hide_nothing_else() -> None:
    bus = MemoryBus(MemoryLog(ManualClock()))
    admin = await bus.admin()
    await admin.create(shared_topics())
    kept, gone = a_credential(keys.new_key()), a_credential(keys.new_key())
    await keys.publish(bus, kept)
    await keys.publish(bus, gone)
    producer = await bus.producer()
    await (await producer.send(CREDENTIALS, b"garbage", key=b"x", partition=0))
    await (await producer.send(CREDENTIALS, None, key=gone.key_id.encode(), partition=0))
    assert await keys.read_all(bus) == {kept.key_id: kept}


def test_lists_show_no_hmac() -> None:
    record = a_credential(keys.new_key())
    for shown in (keyring.as_text((record,)), keyring.as_json((record,))):
        assert record.key_id in shown
        assert record.hmac not in shown
    assert "concurrent 2" in keyring.as_text((record,))


def test_lists_show_what_cannot_be_printed_escaped() -> None:
    record = msgspec.structs.replace(a_credential(keys.new_key()), name="a\x1b[2J\nb\u202e", tenant="Müller")
    shown = keyring.as_text((record,))
    assert "a\\x1b[2J\\nb\\u202e" in shown
    assert "Müller" in shown
    assert len(shown.splitlines()) == 2
