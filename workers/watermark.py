"""How far a lane's records have taken effect: what may be committed, and the hint that goes with it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from wire.errors import WireError


class BadHint(WireError):
    """A commit's metadata isn't a hint of ours; the journal must be read from its start."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Read the journal from `offset`, where `epoch` is current. May only be too old, never too new (R5)."""

    offset: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.offset}:{self.epoch}"

    @classmethod
    def parse(cls, metadata: str) -> Hint:
        """The hint in a commit's metadata; BadHint for anything else."""
        try:
            offset, epoch = (int(part) for part in metadata.split(":"))
        except ValueError as exc:
            raise BadHint(f"{metadata!r} isn't offset:epoch") from exc
        return cls(offset, epoch)


class Watermark:
    """Offsets of one lane, read in order, passed in any order; committed up to the first that isn't passed."""

    def __init__(self, start: int) -> None:
        self.read_to = start
        """the next offset that was not read yet"""
        self._open: OrderedDict[int, None] = OrderedDict()

    def read(self, offset: int) -> bool:
        """Take note of a record; False if it was read before (a rebalance reads again from the commit)."""
        if offset < self.read_to:
            return False
        self.read_to = offset + 1
        self._open[offset] = None
        return True

    def passed(self, offset: int) -> None:
        """The record at `offset` has taken effect for good."""
        self._open.pop(offset, None)

    @property
    def committable(self) -> int:
        """The next offset a new owner must read."""
        return next(iter(self._open), self.read_to)
