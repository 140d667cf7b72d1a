"""A shard's ownership, journal, takeover and watermark: one pure state machine.

Records and events in, effects out (`workers.effects`); nothing here waits, reads a clock or draws a number.
`workers.owner` is the shell that does the I/O.

    idle ─claim→ claiming ─appended→ reading ─tail_read→ owning ─(gap, failed send)→ idle, Reclaim

The state is the fold of the journal as this owner has appended it (`workers.appender`). An acknowledged offset that
isn't the next one, or a send that failed, means that somebody else may own the shard: everything that wasn't
acknowledged is dropped unseen (R2, R3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from wire.bus import Commit
from wire.journal import Attempt, Fold, usage_of
from wire.messages import (
    Attach,
    Begin,
    Cancel,
    CancelReason,
    Claim,
    Crash,
    Entry,
    Finish,
    FinishReason,
    Journal,
    Lane,
    Ref,
    Refusal,
    ReplyTo,
    Request,
    Span,
    Tokens,
    ref_lane,
    ref_offset,
    request_ref,
)
from workers.appender import Appender
from workers.effects import (
    Append,
    Effect,
    Halt,
    HaltAll,
    Identity,
    Prepared,
    ReadTail,
    Reclaim,
    Run,
    SendUsage,
    Term,
)
from workers.engine.protocol import Emission
from workers.entries import Shown, View, frames, overall, span_of, stripped
from workers.watermark import Watermark

REMEMBER_MS = 60_000
"""how long a finished attempt can still be attached to without reading the journal"""
DEATHS_TO_END = 3
"""R4: the death of its engine that ends a request"""
DEATHS_TO_ISOLATE = 2
"""after this many a request runs alone, so that the next death names the culprit"""

Phase = Literal["idle", "claiming", "reading", "owning"]
_CANCEL_ENDS: dict[CancelReason, FinishReason] = {"client_gone": "cancelled", "gave_up": "expired", "moved": "moved"}


class Shard:
    """One shard in the hands of one worker."""

    def __init__(self, identity: Identity, shown: Shown) -> None:
        self.identity = identity
        self.phase: Phase = "idle"
        self.epoch: int | None = None
        self._shown = shown
        self._fingerprint = ""
        self._term = Term(number=0)
        self._reset()

    def _reset(self) -> None:
        self._log: Appender | None = None
        self._lanes: dict[Lane, Watermark] = {}
        self._by_id: dict[tuple[str, int], Ref] = {}
        self._early_cancels: dict[tuple[str, int], tuple[Cancel, Lane, int]] = {}
        self._unsent_usage: set[Ref] = set()
        self._redirected: dict[Ref, ReplyTo] = {}

    # ------------------------------------------------------------ what the shell asks

    @property
    def term(self) -> Term:
        return self._term

    @property
    def open_attempts(self) -> list[Attempt]:
        """Attempts without an ending, in the order in which they began."""
        return [] if self._log is None else list(self._log.fold.open.values())

    @property
    def settled(self) -> bool:
        """Nothing is open, on its way to the journal, or owed to the ledger."""
        on_its_way = self._log is not None and self._log.latest is not None
        return not (self.open_attempts or on_its_way or self._unsent_usage)

    def readers(self) -> dict[ReplyTo, list[Ref]]:
        """Who reads the open attempts that end when nobody reads them any more (R4)."""
        out: dict[ReplyTo, list[Ref]] = {}
        for attempt in self.open_attempts:
            if not attempt.begin.request.background and ref_lane(attempt.ref) == "requests":
                out.setdefault(self._reader(attempt), []).append(attempt.ref)
        return out

    def expected(self, lane: Lane) -> int | None:
        """The offset of the lane's next record; None unless owning."""
        mark = self._lanes.get(lane)
        return None if mark is None else mark.read_to

    def knows(self, lane: Lane, offset: int) -> bool:
        """Whether a record need not be prepared: it was read before, or the journal has it."""
        mark = self._lanes.get(lane)
        return mark is None or offset < mark.read_to or request_ref(lane, offset) in self._attempts

    def commits(self) -> dict[Lane, Commit] | None:
        """What the group may be told now; None unless owning. Both lanes go together, with one hint.

        The guarantee: a Request is passed once its Begin is in the journal, a Cancel once its effect is. The hint
        covers every attempt that isn't forgotten yet: open ones, those whose Usage isn't acknowledged or whose
        Request a reader of this commit would read again, and those that a reader may still attach to. So whoever takes
        over finds each Request in the journal's tail or still unread (R5).
        """
        if self._log is None:
            return None
        metadata = str(self._log.hint())
        return {lane: Commit(offset=mark.committable, metadata=metadata) for lane, mark in self._lanes.items()}

    def _needed(self, attempt: Attempt) -> bool:
        if attempt.finish is None or attempt.ref in self._unsent_usage:
            return True
        return ref_offset(attempt.ref) >= self._lanes[ref_lane(attempt.ref)].committable

    # ------------------------------------------------------------ ownership

    def claim(self, nonce: str, fingerprint: str, now_ms: int) -> list[Effect]:
        """Start a term: write a Claim."""
        effects = self.release()
        self.phase, self._fingerprint = "claiming", fingerprint
        claim = Claim(
            engine=self.identity.engine,
            incarnation=self.identity.incarnation,
            nonce=nonce,
            fingerprint=fingerprint,
            at_ms=now_ms,
        )
        return [*effects, Append(term=self._term, record=claim)]

    def release(self) -> list[Effect]:
        """Give the shard up: nothing more leaves, nothing more runs. The journal holds what the next owner needs."""
        effects: list[Effect] = [] if self.epoch is None else [HaltAll(epoch=self.epoch)]
        self._term = Term(number=self._term.number + 1)
        self._reset()
        self.phase, self.epoch = "idle", None
        return effects

    def appended(self, term: Term, offset: int) -> list[Effect]:
        """The oldest Append on its way was acknowledged at `offset`."""
        if term != self._term:
            return []
        if self._log is None:
            return self._claimed(offset)
        released = self._log.acknowledged(offset)
        if released is None:
            return self._lost()
        for lane, passed in released.passed:
            self._lanes[lane].passed(passed)
        return [*frames(released.replies), *(self._send_usage(ref) for ref in released.usages)]

    def _claimed(self, offset: int) -> list[Effect]:
        if offset < 0:
            return self._lost()
        self.phase, self.epoch = "reading", offset
        return [ReadTail(term=self._term, until=offset)]

    def append_failed(self, term: Term) -> list[Effect]:
        """A send's outcome is unknown: the same as a gap."""
        return self._lost() if term == self._term else []

    def _lost(self) -> list[Effect]:
        return [*self.release(), Reclaim(term=self._term)]

    # ------------------------------------------------------------ takeover

    def tail_read(
        self, term: Term, fold: Fold, sizes_bytes: dict[Ref, int], starts: dict[Lane, int], now_ms: int
    ) -> list[Effect]:
        """The journal up to the Claim is folded: take over what it holds.

        `sizes_bytes`: how much of the tail lies after each attempt's oldest record. `starts`: the committed offset of
        each lane, from which its records will come.
        """
        if term != self._term or self.epoch is None:
            return []
        if fold.epoch != self.epoch:  # the commit is of a later owner: the Claim lies before where the tail starts
            return self._lost()
        self.phase, self._log = "owning", Appender(term, self.epoch, fold, sizes_bytes)
        self._lanes = {lane: Watermark(start) for lane, start in starts.items()}
        effects: list[Effect] = []
        for attempt in list(fold.attempts.values()):
            request = attempt.begin.request
            self._by_id[request.request_id, request.attempt] = attempt.ref
            effects += self._take_over(attempt, now_ms)
        return effects

    def _take_over(self, attempt: Attempt, now_ms: int) -> list[Effect]:
        if attempt.finish is not None:
            # Its Usage may have been lost with the last owner, so it goes out again: the ledger counts it once (R6).
            usage = self._send_usage(attempt.ref)
            recent = now_ms - attempt.finish.at_ms <= REMEMBER_MS
            return [usage, *frames(self._everything(attempt))] if recent else [usage]
        told: list[Effect] = list(frames(self._everything(attempt)))
        if attempt.ended:
            return told + self._finish(attempt, self._overall(attempt), now_ms)
        if attempt.crashes >= DEATHS_TO_END:
            return told + self._finish_died(attempt, now_ms)
        return [*told, self._run(attempt)]

    def _run(self, attempt: Attempt, prepared: Prepared | None = None) -> Run:
        return Run(
            epoch=self._owned.epoch,
            attempt=attempt,
            prepared=prepared,
            alone=attempt.crashes >= DEATHS_TO_ISOLATE,
        )

    # ------------------------------------------------------------ records of the shard's lanes

    def request(
        self, lane: Lane, offset: int, request: Request, prepared: Prepared | Refusal, now_ms: int
    ) -> list[Effect]:
        """A Request was read. It gets its Begin, and if it isn't taken on its Finish too, in the order of offsets."""
        if not self._read(lane, offset):
            return []
        ref, name = request_ref(lane, offset), (request.request_id, request.attempt)
        if ref in self._attempts or name in self._by_id:
            return self._pass(lane, offset)
        if name in self._early_cancels:
            cancel, cancel_lane, cancel_offset = self._early_cancels.pop(name)
            effects = self._turn_away(ref, request, _CANCEL_ENDS[cancel.reason], None, now_ms)
            self._pass(cancel_lane, cancel_offset)
        elif now_ms > request.accept_by_ms:
            effects = self._turn_away(ref, request, "expired", None, now_ms)
        elif isinstance(prepared, Refusal):
            effects = self._turn_away(ref, request, "refused", prepared, now_ms)
        else:
            effects = self._begin(ref, request, prepared, now_ms)
        self._pass(lane, offset)
        return effects

    def _begin(self, ref: Ref, request: Request, prepared: Prepared, now_ms: int) -> list[Effect]:
        append = self._append_begin(ref, request, len(prepared.prompt), now_ms)
        attempt = self._attempts[ref]
        self._leave_with_latest([(request.reply, self._view.accepted(attempt))])
        return [append, self._run(attempt, prepared)]

    def _turn_away(
        self, ref: Ref, request: Request, reason: FinishReason, refusal: Refusal | None, now_ms: int
    ) -> list[Effect]:
        begin = self._append_begin(ref, stripped(request), 0, now_ms)
        return [begin, *self._finish(self._attempts[ref], reason, now_ms, refusal=refusal)]

    def _append_begin(self, ref: Ref, request: Request, prompt_tokens: int, now_ms: int) -> Append:
        self._by_id[request.request_id, request.attempt] = ref
        return self._append(
            Begin(
                epoch=self._owned.epoch,
                ref=ref,
                request=request,
                prompt_tokens=prompt_tokens,
                at_ms=now_ms,
            )
        )

    def cancel(self, lane: Lane, offset: int, cancel: Cancel, now_ms: int) -> list[Effect]:
        """A Cancel was read: its effect is a Finish. One for a Request not read yet waits while that can still come.

        Cancels of both lanes travel on the requests lane, so one can overtake the Request it is for.
        """
        if not self._read(lane, offset):
            return []
        name = (cancel.request_id, cancel.attempt)
        ref = self._by_id.get(name)
        if ref is None:
            if now_ms <= cancel.accept_by_ms and name not in self._early_cancels:
                self._early_cancels[name] = (cancel, lane, offset)
                return []
            return self._pass(lane, offset)
        attempt = self._attempts[ref]
        effects: list[Effect] = []
        if attempt.finish is None:
            effects = self._finish(attempt, _CANCEL_ENDS[cancel.reason], now_ms, halt=True)
        self._pass(lane, offset)
        return effects

    def attach(self, lane: Lane, offset: int, attach: Attach) -> list[Effect]:
        """An Attach was read: answer with everything of the attempt, and send what follows there too (R7)."""
        if not self._read(lane, offset):
            return []
        self._pass(lane, offset)
        ref = self._by_id.get((attach.request_id, attach.attempt))
        if ref is None:
            return self._leave_with_latest([(attach.reply, self._view.unknown(attach))])
        self._redirected[ref] = attach.reply
        return self._leave_with_latest(self._everything(self._attempts[ref]))

    def skip(self, lane: Lane, offset: int) -> None:
        """A record that can't be decoded was read (and sent to `dead`)."""
        if self._read(lane, offset):
            self._pass(lane, offset)

    def _read(self, lane: Lane, offset: int) -> bool:
        return self.phase == "owning" and self._lanes[lane].read(offset)

    def _pass(self, lane: Lane, offset: int) -> list[Effect]:
        # Its effect rests on what was appended up to now, so it is durable when the last of that is.
        latest = self._owned.latest
        if latest is not None:
            latest.passed.append((lane, offset))
        else:
            self._lanes[lane].passed(offset)
        return []

    # ------------------------------------------------------------ the engine

    def stepped(self, emissions: Iterable[Emission], now_ms: int) -> list[Effect]:
        """One engine step: one Tokens record, then the endings."""
        spans: list[Span] = []
        cached: list[tuple[Ref, int]] = []
        replies: list[tuple[ReplyTo, Entry]] = []
        failed: list[tuple[Attempt, str]] = []
        touched: dict[Ref, Attempt] = {}
        for emission in emissions:
            attempt = self._running(emission)
            if attempt is None:
                continue
            if emission.error is not None:
                failed.append((attempt, emission.error))
                continue
            if emission.cached_tokens is not None and not attempt.spoke:
                cached.append((attempt.ref, emission.cached_tokens))
            spans.append(span_of(emission))
            replies.append((self._reader(attempt), self._view.delta(attempt, emission)))
            touched[attempt.ref] = attempt
        effects: list[Effect] = []
        if spans:
            record = Tokens(epoch=self._owned.epoch, spans=tuple(spans), at_ms=now_ms, cached=tuple(cached))
            effects.append(self._append(record, replies))
        for attempt in touched.values():
            if attempt.ended:
                effects += self._finish(attempt, self._overall(attempt), now_ms)
        for attempt, error in failed:
            if attempt.finish is None:
                effects += self._finish(attempt, "error", now_ms, error=error, halt=True)
        return effects

    def _running(self, emission: Emission) -> Attempt | None:
        # What the engine still says of a former epoch, or of a request that was cancelled meanwhile, is dropped.
        if self.phase != "owning" or emission.key.epoch != self.epoch:
            return None
        attempt = self._attempts.get(emission.key.ref)
        return attempt if attempt is not None and attempt.finish is None else None

    def failed(self, epoch: int, ref: Ref, error: str, now_ms: int) -> list[Effect]:
        """A request that was taken over can't be run here after all."""
        attempt = self._attempts.get(ref)
        if self.phase != "owning" or epoch != self.epoch or attempt is None or attempt.finish is not None:
            return []
        return self._finish(attempt, "error", now_ms, error=error, halt=True)

    def engine_died(self, running: frozenset[Ref], now_ms: int) -> list[Effect]:
        """The engine died while it ran `running`; everything else it had was only waiting.

        The third death ends a request; the others are run again, from where their journal stands (R4).
        """
        if self.phase != "owning":
            return []
        suspects = tuple(a.ref for a in self.open_attempts if a.ref in running)
        effects: list[Effect] = []
        if suspects:
            effects.append(self._append(Crash(epoch=self._owned.epoch, refs=suspects, at_ms=now_ms)))
        for attempt in self.open_attempts:
            if attempt.crashes >= DEATHS_TO_END:
                effects += self._finish_died(attempt, now_ms)
            else:
                effects.append(self._run(attempt))
        return effects

    def _finish_died(self, attempt: Attempt, now_ms: int) -> list[Effect]:
        error = f"the engine died {attempt.crashes} times while it ran this request"
        return self._finish(attempt, "error", now_ms, error=error)

    # ------------------------------------------------------------ time and readers

    def tick(self, now_ms: int) -> list[Effect]:
        """Deadlines, Carries, and what may be forgotten. Call about once a second."""
        if self.phase != "owning":
            return []
        effects: list[Effect] = []
        for attempt in list(self._attempts.values()):
            if attempt.finish is None and now_ms > attempt.begin.request.deadline_ms:
                effects += self._finish(attempt, "timeout", now_ms, halt=True)
            elif self._needed(attempt):
                effects += [self._owned.carry(attempt, now_ms)] if self._owned.is_old(attempt, now_ms) else []
            elif attempt.finish is not None and now_ms - attempt.finish.at_ms > REMEMBER_MS:
                self._forget(attempt)
        for name, (cancel, lane, offset) in list(self._early_cancels.items()):
            if now_ms > cancel.accept_by_ms:  # past it the Request, if it ever comes, expires by itself (R1)
                del self._early_cancels[name]
                self._pass(lane, offset)
        return effects

    def vanished(self, reader: ReplyTo, now_ms: int) -> list[Effect]:
        """The process that reads these frames has been gone for the grace time (R4)."""
        if self.phase != "owning":
            return []
        effects: list[Effect] = []
        for ref in self.readers().get(reader, []):
            effects += self._finish(self._attempts[ref], "cancelled", now_ms, halt=True)
        return effects

    def usage_sent(self, term: Term, ref: Ref) -> None:
        """A Usage is acknowledged: the attempt isn't needed for it any more."""
        if term == self._term:
            self._unsent_usage.discard(ref)

    def written(self, size_bytes: int) -> None:
        """How large the latest Append is once encoded: counts towards the next Carry."""
        if self._log is not None:
            self._log.written(size_bytes)

    def _forget(self, attempt: Attempt) -> None:
        request = attempt.begin.request
        self._owned.forget(attempt.ref)
        self._by_id.pop((request.request_id, request.attempt), None)
        self._redirected.pop(attempt.ref, None)

    # ------------------------------------------------------------ appending

    @property
    def _owned(self) -> Appender:
        if self._log is None:
            raise RuntimeError("a shard that isn't owned writes nothing")
        return self._log

    @property
    def _attempts(self) -> dict[Ref, Attempt]:
        return {} if self._log is None else self._log.fold.attempts

    def _append(self, record: Journal, replies: Iterable[tuple[ReplyTo, Entry]] = ()) -> Append:
        return self._owned.append(record, replies)

    def _finish(
        self,
        attempt: Attempt,
        reason: FinishReason,
        now_ms: int,
        *,
        error: str | None = None,
        refusal: Refusal | None = None,
        halt: bool = False,
    ) -> list[Effect]:
        finish = Finish(
            epoch=self._owned.epoch,
            ref=attempt.ref,
            reason=reason,
            ends=tuple(choice.end for choice in attempt.choices),
            prompt_tokens=attempt.begin.prompt_tokens,
            cached_tokens=attempt.cached_tokens,
            completion_tokens=attempt.completion_tokens,
            at_ms=now_ms,
            error=error,
            refusal=refusal,
        )
        append = self._append(finish, [(self._reader(attempt), self._view.ending(attempt, finish))])
        if (latest := self._owned.latest) is not None:
            latest.usages.append(attempt.ref)
        self._unsent_usage.add(attempt.ref)
        return [append, Halt(epoch=self._owned.epoch, ref=attempt.ref)] if halt else [append]

    def _send_usage(self, ref: Ref) -> SendUsage:
        self._unsent_usage.add(ref)
        usage = usage_of(self.identity.fleet, self.identity.shard, self._attempts[ref])
        return SendUsage(term=self._term, ref=ref, usage=usage)

    def _leave_with_latest(self, replies: list[tuple[ReplyTo, Entry]]) -> list[Effect]:
        # They may rest on appends that aren't acknowledged yet, so they leave with the last of them (R2).
        latest = self._owned.latest
        if latest is None:
            return list(frames(replies))
        latest.replies.extend(replies)
        return []

    # ------------------------------------------------------------ what readers see

    @property
    def _view(self) -> View:
        return View(identity=self.identity, shown=self._shown, fingerprint=self._fingerprint, epoch=self._owned.epoch)

    def _overall(self, attempt: Attempt) -> FinishReason:
        return overall([choice.end for choice in attempt.choices])

    def _reader(self, attempt: Attempt) -> ReplyTo:
        return self._redirected.get(attempt.ref, attempt.begin.request.reply)

    def _everything(self, attempt: Attempt) -> list[tuple[ReplyTo, Entry]]:
        reader = self._reader(attempt)
        return [(reader, entry) for entry in self._view.all(attempt)]
