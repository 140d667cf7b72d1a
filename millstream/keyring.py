"""`millstream keys …` on a running stack."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from millstream import keys, runfile
from millstream.errors import StackError
from millstream.state import StateDir, secret
from millstream.table import table
from wire.clock import SystemClock
from wire.kafka import KafkaBus
from wire.messages import Credential, Limits


async def create(
    state_dir: Path,
    *,
    tenant: str,
    project: str,
    name: str,
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    concurrent: int | None,
    models: tuple[str, ...],
) -> str:
    """A new key that every ingress will know; the key itself, which is kept nowhere."""
    bus = _bus(state_dir)
    key = keys.new_key()
    limits = Limits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent=concurrent,
        models=models,
    )
    record = keys.credential(
        key,
        secret(StateDir.at(state_dir)),
        tenant=tenant,
        project=project,
        name=name,
        now_ms=_now_ms(),
        limits=limits,
    )
    await keys.publish(bus, record)
    return key


async def every(state_dir: Path) -> tuple[Credential, ...]:
    """All keys, the revoked ones too, oldest first."""
    return tuple((await keys.read_all(_bus(state_dir))).values())


async def revoke(state_dir: Path, key_or_id: str) -> str:
    """Make a key void; a sentence. StackError when there is none of this id."""
    bus = _bus(state_dir)
    known: Mapping[str, Credential] = await keys.read_all(bus)
    key_id = keys.key_id_of(key_or_id) or key_or_id
    found = known.get(key_id)
    if found is None:
        raise StackError(f"there is no key with the id {key_id!r}; `millstream keys list` shows them")
    if found.revoked_ms is not None:
        return f"{key_id} had been revoked before, at {_when(found.revoked_ms)}"
    await keys.publish(bus, keys.revoked(found, _now_ms()))
    return f"{key_id} is revoked"


def as_text(found: tuple[Credential, ...]) -> str:
    """A table for people."""
    rows = [
        (
            one.key_id,
            _shown(one.tenant),
            _shown(one.project),
            _shown(one.name),
            _when(one.created_ms),
            "revoked" if one.revoked_ms is not None else "valid",
            _limits(one.limits),
        )
        for one in found
    ]
    return table(("id", "tenant", "project", "name", "made", "state", "limits"), rows)


def as_json(found: tuple[Credential, ...]) -> str:
    """Everything but the HMAC."""
    plain = [msgspec.to_builtins(one) for one in found]
    return msgspec.json.encode([{k: v for k, v in one.items() if k not in ("hmac", "t")} for one in plain]).decode()


def _shown(text: str) -> str:
    """With what can't be printed escaped: it could steer the terminal, or hide a key from who reads the list."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _limits(limits: Limits) -> str:
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in msgspec.to_builtins(limits).items() if value]
    return ", ".join(parts) or "none"


def _when(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _bus(state_dir: Path) -> KafkaBus:
    return KafkaBus(runfile.running(state_dir).settings().cluster, SystemClock())
