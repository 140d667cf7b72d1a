"""What owners say to the engine, kept while there is none to hear it."""

from __future__ import annotations

from typing import Protocol

from workers.engine.protocol import Key, Sequence


class Engine(Protocol):
    """What an owner asks of the engine host."""

    def add(self, sequence: Sequence) -> None: ...
    def cancel(self, key: Key) -> None: ...
    def drop(self, shard: int, epoch: int) -> None: ...


class Gate:
    """Open, it passes everything on; shut, it keeps what was added and not cancelled until it opens again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[Key, Sequence] | None = None

    def shut(self) -> None:
        """The engine is dead: all it had is gone, and will be added again by those whose it was."""
        self._kept = {}

    def open(self) -> None:
        """There is an engine again."""
        kept, self._kept = self._kept, None
        for sequence in (kept or {}).values():
            self._engine.add(sequence)

    def add(self, sequence: Sequence) -> None:
        if self._kept is None:
            self._engine.add(sequence)
        else:
            self._kept[sequence.key] = sequence

    def cancel(self, key: Key) -> None:
        if self._kept is None:
            self._engine.cancel(key)
        else:
            self._kept.pop(key, None)

    def drop(self, shard: int, epoch: int) -> None:
        if self._kept is None:
            self._engine.drop(shard, epoch)
        else:
            self._kept = {k: s for k, s in self._kept.items() if (k.shard, k.epoch) != (shard, epoch)}
