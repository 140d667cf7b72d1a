"""What a journal says: the fold that takeover, resume and reconciliation share. Pure.

A record counts only if its epoch is that of the latest Claim before it (R3); everything else in the partition was
written by an owner that no longer was one, and never reached a client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.errors import WireError
from wire.fleet import Fleet
from wire.messages import (
    Begin,
    Carry,
    ChoiceEnd,
    Claim,
    Crash,
    Finish,
    Journal,
    Logprob,
    Ref,
    Scored,
    Span,
    Tokens,
    Usage,
    ref_lane,
)


class JournalBroken(WireError):
    """Records that count contradict one another: the journal was written by something that isn't Millstream."""


@dataclass(slots=True)
class Choice:
    """One choice's tokens so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    end: ChoiceEnd | None = None
    prompt: Scored | None = None


@dataclass(slots=True)
class Attempt:
    """One attempt as its journal tells it."""

    begin: Begin
    begin_offset: int
    """where it was first written"""
    oldest_offset: int
    """the oldest record needed to rebuild it: its Begin, or its latest Carry"""
    oldest_epoch: int
    """the epoch that was current at `oldest_offset`"""
    oldest_ms: int
    """when that record was written"""
    choices: list[Choice]
    cached_tokens: int
    """of the prompt, found in the engine's cache: fixed once the attempt has begun to speak"""
    crashes: int = 0
    first_token_ms: int | None = None
    finish: Finish | None = None
    finish_offset: int | None = None

    @property
    def ref(self) -> Ref:
        return self.begin.ref

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.ids) for choice in self.choices)

    @property
    def spoke(self) -> bool:
        """Whether any choice has tokens or an end."""
        return any(choice.ids or choice.end is not None for choice in self.choices)

    @property
    def ended(self) -> bool:
        """Whether every choice has ended, though its Finish may not be written yet."""
        return all(choice.end is not None for choice in self.choices)

    def spans(self) -> tuple[Span, ...]:
        """All tokens so far, one span a choice."""
        return tuple(
            Span(self.ref, index, 0, tuple(c.ids), tuple(c.logprobs) if c.logprobs else None, c.end, c.prompt)
            for index, c in enumerate(self.choices)
        )


class Fold:
    """Journal records in, attempts out.

    `epoch` is the one that is current where reading starts, if it is known. Where it isn't (reading from the log's
    start, after the Claim was deleted), the highest epoch seen before the first Claim is taken for it: an epoch is an
    offset, so a former owner's is always lower.
    """

    def __init__(self, epoch: int | None = None) -> None:
        self.epoch = epoch
        self.attempts: dict[Ref, Attempt] = {}
        self.open: dict[Ref, Attempt] = {}
        """those without a Finish, in the order in which they began"""
        self._inferred = False

    def apply(self, offset: int, record: Journal) -> Attempt | None:
        """Take one record; the attempt it completed, if it was a Finish that counts.

        JournalBroken when records that count leave a gap or speak twice.
        """
        if isinstance(record, Claim):
            self.epoch, self._inferred = offset, False
            return None
        if not self._counts(record.epoch):
            return None
        match record:
            case Begin():
                self._begin(offset, record)
            case Tokens():
                for ref, cached_tokens in record.cached:
                    self._cached(ref, cached_tokens)
                for span in record.spans:
                    self._span(span, record.at_ms)
            case Carry():
                self._carry(offset, record)
            case Crash():
                for ref in record.refs:
                    if (attempt := self.attempts.get(ref)) is not None:
                        attempt.crashes += 1
            case Finish():
                return self._finish(offset, record)
        return None

    def forget(self, ref: Ref) -> None:
        """Drop an attempt that isn't needed any more."""
        self.attempts.pop(ref, None)
        self.open.pop(ref, None)

    def _counts(self, epoch: int) -> bool:
        if self.epoch is None or (self._inferred and epoch > self.epoch):
            self.epoch, self._inferred = epoch, True
            self.attempts.clear()
            self.open.clear()
        return epoch == self.epoch

    def _begin(self, offset: int, record: Begin) -> None:
        if record.ref in self.attempts:
            raise JournalBroken(f"request {record.ref} begins twice, again at offset {offset}")
        self.attempts[record.ref] = self.open[record.ref] = Attempt(
            begin=record,
            begin_offset=offset,
            oldest_offset=offset,
            oldest_epoch=record.epoch,
            oldest_ms=record.at_ms,
            choices=[Choice() for _ in range(record.request.body.n)],
            cached_tokens=record.cached_tokens,
        )

    def _cached(self, ref: Ref, cached_tokens: int) -> None:
        attempt = self.attempts.get(ref)
        if attempt is not None and not attempt.spoke:
            attempt.cached_tokens = cached_tokens

    def _span(self, span: Span, at_ms: int) -> None:
        attempt = self.attempts.get(span.ref)
        if attempt is None:
            return  # began before the part of the journal that was asked for
        extend(attempt, span, at_ms)

    def _carry(self, offset: int, record: Carry) -> None:
        ref = record.begin.ref
        attempt = self.attempts.get(ref)
        if attempt is None:
            attempt = self.attempts[ref] = _carried(offset, record)
            if attempt.finish is None:
                self.open[ref] = attempt
        elif attempt.spans() != record.spans:
            raise JournalBroken(f"request {ref} is carried at offset {offset} with other tokens than it had")
        attempt.oldest_offset, attempt.oldest_epoch, attempt.oldest_ms = offset, record.epoch, record.at_ms

    def _finish(self, offset: int, record: Finish) -> Attempt | None:
        attempt = self.attempts.get(record.ref)
        if attempt is None:
            return None
        if attempt.finish is not None:
            raise JournalBroken(f"request {record.ref} finishes twice, again at offset {offset}")
        stands, says = (
            (attempt.completion_tokens, attempt.cached_tokens),
            (record.completion_tokens, record.cached_tokens),
        )
        if stands != says:
            raise JournalBroken(
                f"request {record.ref} finishes at offset {offset} with {says[0]} tokens, {says[1]} cached,"
                f" the journal holds {stands[0]} and {stands[1]}"
            )
        attempt.finish, attempt.finish_offset = record, offset
        del self.open[record.ref]
        return attempt


def _carried(offset: int, record: Carry) -> Attempt:
    attempt = Attempt(
        begin=record.begin,
        begin_offset=record.begin_offset,
        oldest_offset=offset,
        oldest_epoch=record.epoch,
        oldest_ms=record.at_ms,
        choices=[Choice() for _ in range(record.begin.request.body.n)],
        cached_tokens=record.begin.cached_tokens if record.cached_tokens is None else record.cached_tokens,
        crashes=record.crashes,
    )
    for span in record.spans:
        extend(attempt, span, record.at_ms)
    attempt.first_token_ms = record.first_token_ms
    attempt.finish, attempt.finish_offset = record.finish, record.finish_offset
    return attempt


def extend(attempt: Attempt, span: Span, at_ms: int) -> None:
    """Add a span to an attempt; JournalBroken unless it starts where the choice stands."""
    if not 0 <= span.choice < len(attempt.choices):
        raise JournalBroken(f"request {span.ref} has no choice {span.choice}")
    choice = attempt.choices[span.choice]
    if span.first != len(choice.ids) or choice.end is not None or attempt.finish is not None:
        raise JournalBroken(
            f"request {span.ref}, choice {span.choice}: a span at position {span.first},"
            f" the journal stands at {len(choice.ids)}"
        )
    choice.ids.extend(span.ids)
    if span.logprobs is not None:
        choice.logprobs.extend(span.logprobs)
    choice.end = span.end
    choice.prompt = choice.prompt or span.prompt
    if attempt.first_token_ms is None and span.ids:
        attempt.first_token_ms = at_ms


def usage_of(fleet: Fleet, shard: int, attempt: Attempt) -> Usage:
    """The Usage of a finished attempt: a pure fold, so sending it again sends the same bytes (R2)."""
    finish, request = attempt.finish, attempt.begin.request
    if finish is None or attempt.finish_offset is None:
        raise ValueError("only a finished attempt has a usage")
    return Usage(
        request_id=request.request_id,
        attempt=request.attempt,
        tenant=request.tenant,
        project=request.project,
        key_id=request.key_id,
        model=request.model,
        version=request.version,
        tier=request.tier,
        lane=ref_lane(attempt.ref),
        fleet=fleet,
        shard=shard,
        ref=attempt.ref,
        begin_offset=attempt.begin_offset,
        finish_offset=attempt.finish_offset,
        reason=finish.reason,
        prompt_tokens=finish.prompt_tokens,
        cached_tokens=finish.cached_tokens,
        completion_tokens=finish.completion_tokens,
        created_ms=request.created_ms,
        begun_ms=attempt.begin.at_ms,
        first_token_ms=attempt.first_token_ms,
        finished_ms=finish.at_ms,
    )
