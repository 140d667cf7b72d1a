"""API keys: made here, shown once, kept in the log only as an HMAC."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable

import msgspec

from ingress.credentials import hmac_secret, key_hmac
from millstream.observe import read_to_end
from wire import codec
from wire.bus import Bus, Partition
from wire.errors import DecodeError
from wire.messages import Credential, Limits
from wire.topics import CREDENTIALS

KEY = re.compile(r"sk-ms-(?P<key_id>[0-9a-f]{12})-[0-9a-f]{48}\Z")


def new_key(token_hex: Callable[[int], str] = secrets.token_hex) -> str:
    """A fresh key: sk-ms-<key id>-<secret>."""
    return f"sk-ms-{token_hex(6)}-{token_hex(24)}"


def key_id_of(key: str) -> str | None:
    """The key's id; None if it isn't of our making."""
    match = KEY.match(key)
    return match["key_id"] if match else None


def digest(secret: str, key: str) -> str:
    """What is stored of a key: hex HMAC-SHA256 under the installation's secret (hex digits)."""
    return key_hmac(hmac_secret(secret), key)


def credential(
    key: str, secret: str, *, tenant: str, project: str, name: str, now_ms: int, limits: Limits
) -> Credential:
    """The record that makes `key` valid."""
    key_id = key_id_of(key)
    if key_id is None:
        raise ValueError("not a key that new_key made")
    return Credential(
        key_id=key_id,
        hmac=digest(secret, key),
        tenant=tenant,
        project=project,
        name=name,
        created_ms=now_ms,
        limits=limits,
    )


def revoked(record: Credential, now_ms: int) -> Credential:
    """The record that makes a key void."""
    return msgspec.structs.replace(record, revoked_ms=now_ms)


async def publish(bus: Bus, record: Credential) -> None:
    """Write a credential; when this returns every ingress will see it."""
    producer = await bus.producer(client_id="millstream-keys")
    try:
        sent = await producer.send(CREDENTIALS, codec.encode(record), key=record.key_id.encode(), partition=0)
        await sent
    finally:
        await producer.stop()


async def read_all(bus: Bus) -> dict[str, Credential]:
    """Every credential by key id, revoked ones too, oldest first. Unavailable while the log is away."""
    found: dict[str, Credential] = {}
    for record in await read_to_end(bus, {Partition(CREDENTIALS, 0): "earliest"}):
        key_id = (record.key or b"").decode(errors="replace")
        found.pop(key_id, None)
        with contextlib.suppress(DecodeError):  # the ingress reports what it can't read
            found[key_id] = codec.decode(record.value, Credential)
    return dict(sorted(found.items(), key=lambda item: item[1].created_ms))
