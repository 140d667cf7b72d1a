"""What the I/O process and the engine process say to each other: length-prefixed msgpack on a socket pair."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from workers.engine.protocol import Emission, Key, Load, Sequence

_LENGTH = struct.Struct("<I")


class _Said(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", tag=True):
    """Root of all that is said."""


class Config(_Said, frozen=True, kw_only=True):
    """What the engine process needs to know; the first message to it."""

    kind: str
    """torch or simulated"""
    slots: int
    threads: int
    context_tokens: int
    model_dir: str | None
    simulated_ttft_ms: float
    simulated_tbt_ms: float
    log_level: str
    numerics: str = ""


class Add(_Said, frozen=True, kw_only=True):
    sequence: Sequence


class Forget(_Said, frozen=True, kw_only=True):
    """`Engine.cancel`."""

    key: Key


class Drop(_Said, frozen=True, kw_only=True):
    """`Engine.drop`."""

    shard: int
    epoch: int


class Applied(_Said, frozen=True, kw_only=True):
    """The journal has taken everything up to this step."""

    step: int


class Stop(_Said, frozen=True, kw_only=True):
    """End after the current step."""


class Ready(_Said, frozen=True, kw_only=True):
    """The engine runs; what it is."""

    fingerprint: str
    context_tokens: int
    vocab_size: int
    load: Load


class Stepped(_Said, frozen=True, kw_only=True):
    """What one step emitted. `number` counts from 1 in each life of the engine."""

    number: int
    emissions: tuple[Emission, ...]
    load: Load


Command = Config | Add | Forget | Drop | Applied | Stop
Report = Ready | Stepped
_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Report)


def frame(said: Command | Report) -> bytes:
    """A message as it goes over the socket."""
    body = msgspec.msgpack.encode(said)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Bytes in, whole messages out."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> None:
        self._waiting += data

    def commands(self) -> Iterator[Command]:
        """The commands that have come whole."""
        return (_commands.decode(body) for body in self._bodies())

    def reports(self) -> Iterator[Report]:
        """The reports that have come whole."""
        return (_reports.decode(body) for body in self._bodies())

    def _bodies(self) -> Iterator[bytes]:
        start = 0
        while len(self._waiting) >= start + _LENGTH.size:
            begin = start + _LENGTH.size
            end = begin + _LENGTH.unpack_from(self._waiting, start)[0]
            if len(self._waiting) < end:
                break
            yield bytes(memoryview(self._waiting)[begin:end])
            start = end
        del self._waiting[:start]
