"""An epoch's own journal: what was appended, what of it is acknowledged, and what a new owner would need. Pure.

Offsets are predicted: as only owners write, the record after offset k gets k + 1. An acknowledgement that says
otherwise means that somebody else writes (R3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from wire.journal import Attempt, Fold
from wire.messages import Begin, Carry, Entry, Journal, Ref, ReplyTo
from workers.effects import Append, Pending, Term
from workers.watermark import Hint

CARRY_AFTER_MS = 5 * 60_000
CARRY_AFTER_BYTES = 64 * 1024 * 1024
"""R5: what is still needed and older than this is journaled again whole, so that a takeover reads a bounded tail"""


class Appender:
    """From a Claim's acknowledgement until the epoch ends."""

    def __init__(self, term: Term, epoch: int, fold: Fold, sizes_bytes: dict[Ref, int]) -> None:
        """`fold`: the journal up to the Claim. `sizes_bytes`: what was read from each attempt's oldest record on."""
        self.epoch = epoch
        self.fold = fold
        self._term = term
        self._next_offset = epoch + 1
        self._pending: deque[Pending] = deque()
        self._before_carry: dict[Ref, Hint] = {}
        self._appended_bytes = 0
        self._oldest_bytes = {ref: -size for ref, size in sizes_bytes.items()}

    @property
    def latest(self) -> Pending | None:
        """The last Append that isn't acknowledged: what rests on everything appended so far leaves with it (R2)."""
        return self._pending[-1] if self._pending else None

    def append(self, record: Journal, replies: Iterable[tuple[ReplyTo, Entry]] = ()) -> Append:
        """Write a record; `replies` leave once it is acknowledged."""
        self.fold.apply(self._next_offset, record)
        if isinstance(record, Begin | Carry):
            ref = record.ref if isinstance(record, Begin) else record.begin.ref
            self._oldest_bytes[ref] = self._appended_bytes
        self._pending.append(Pending(offset=self._next_offset, replies=list(replies)))
        self._next_offset += 1
        return Append(term=self._term, record=record)

    def acknowledged(self, offset: int) -> Pending | None:
        """What the oldest Append's acknowledgement releases; None if its offset shows another writer."""
        pending = self._pending.popleft()
        if offset != pending.offset:
            return None
        if pending.carried is not None:
            self._before_carry.pop(pending.carried, None)
        return pending

    def hint(self) -> Hint:
        """From where a new owner must read: covers every attempt of the fold, and all that isn't acknowledged."""
        hints = [Hint(self._pending[0].offset if self._pending else self._next_offset, self.epoch)]
        for attempt in self.fold.attempts.values():
            # Until its Carry is acknowledged, a new owner needs the records that it replaces.
            durable = self._before_carry.get(attempt.ref)
            hints.append(durable or Hint(attempt.oldest_offset, attempt.oldest_epoch))
        return min(hints, key=lambda hint: hint.offset)

    def is_old(self, attempt: Attempt, now_ms: int) -> bool:
        """Whether an attempt that is still needed must be carried.

        Not while a Carry of it is on its way: what the hint must cover until then is what lies before the first one.
        """
        if attempt.ref in self._before_carry:
            return False
        size_bytes = self._appended_bytes - self._oldest_bytes.get(attempt.ref, 0)
        return now_ms - attempt.oldest_ms > CARRY_AFTER_MS or size_bytes > CARRY_AFTER_BYTES

    def carry(self, attempt: Attempt, now_ms: int) -> Append:
        """Write an attempt again whole."""
        self._before_carry.setdefault(attempt.ref, Hint(attempt.oldest_offset, attempt.oldest_epoch))
        append = self.append(
            Carry(
                epoch=self.epoch,
                begin=attempt.begin,
                begin_offset=attempt.begin_offset,
                spans=attempt.spans(),
                crashes=attempt.crashes,
                cached_tokens=attempt.cached_tokens,
                at_ms=now_ms,
                first_token_ms=attempt.first_token_ms,
                finish=attempt.finish,
                finish_offset=attempt.finish_offset,
            )
        )
        self._pending[-1].carried = attempt.ref
        return append

    def forget(self, ref: Ref) -> None:
        """An attempt isn't needed any more."""
        self.fold.forget(ref)
        self._oldest_bytes.pop(ref, None)

    def written(self, size_bytes: int) -> None:
        """How large an Append is once encoded."""
        self._appended_bytes += size_bytes
