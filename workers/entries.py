"""What readers are shown of an attempt: the entries of reply frames. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from wire.calls import may_call
from wire.journal import Attempt
from wire.messages import (
    Accepted,
    Attach,
    Body,
    ChoiceEnd,
    Delta,
    End,
    Entry,
    Finish,
    FinishReason,
    Frames,
    Logprob,
    Refusal,
    Refused,
    ReplyTo,
    Request,
    Scored,
    Span,
    TokenLogprob,
)
from workers.effects import Identity, Reply
from workers.engine.protocol import Emission


class Shown(Protocol):
    """How tokens look to people. Pure: the tokenizer's answers never change."""

    def render_text(
        self, ids: Sequence[int], stop: Sequence[str], end: ChoiceEnd | None, *, calls: bool = False
    ) -> str:
        """All text that these ids have released; `calls`: it may hold tool calls."""
        ...

    def show_logprobs(self, ids: Sequence[int], logprobs: Sequence[Logprob]) -> tuple[TokenLogprob, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One epoch's view of attempts."""

    identity: Identity
    shown: Shown
    fingerprint: str
    epoch: int

    def accepted(self, attempt: Attempt) -> Accepted:
        request = attempt.begin.request
        return Accepted(
            request_id=request.request_id,
            attempt=request.attempt,
            epoch=self.epoch,
            fleet=self.identity.fleet,
            shard=self.identity.shard,
            ref=attempt.ref,
            prompt_tokens=attempt.begin.prompt_tokens,
            cached_tokens=attempt.cached_tokens,
            fingerprint=self.fingerprint,
        )

    def delta(self, attempt: Attempt, emission: Emission) -> Delta:
        request = attempt.begin.request
        shown = self.shown.show_logprobs(emission.ids, emission.logprobs) if emission.logprobs is not None else None
        return Delta(
            request_id=request.request_id,
            attempt=request.attempt,
            epoch=self.epoch,
            choice=emission.choice,
            first=emission.first,
            ids=emission.ids,
            text=emission.text,
            logprobs=shown,
            end=emission.end,
            prompt=self._prompt(emission.prompt),
        )

    def whole(self, attempt: Attempt, index: int) -> Delta:
        """All of a choice so far, from position 0 (R7)."""
        request, choice = attempt.begin.request, attempt.choices[index]
        wanted = request.body.logprobs is not None
        return Delta(
            request_id=request.request_id,
            attempt=request.attempt,
            epoch=self.epoch,
            choice=index,
            first=0,
            ids=tuple(choice.ids),
            text=self.shown.render_text(choice.ids, request.body.stop, choice.end, calls=may_call(request.body)),
            logprobs=self.shown.show_logprobs(choice.ids, choice.logprobs) if wanted else None,
            end=choice.end,
            prompt=self._prompt(choice.prompt),
        )

    def _prompt(self, scored: Scored | None) -> tuple[TokenLogprob, ...] | None:
        return None if scored is None else self.shown.show_logprobs(scored.ids, (Logprob(0.0), *scored.logprobs))

    def ending(self, attempt: Attempt, finish: Finish) -> Entry:
        """Refused for a refusal, End for every other ending."""
        request = attempt.begin.request
        if finish.refusal is not None:
            return self._refused(request.request_id, request.attempt, finish.refusal)
        return End(
            request_id=request.request_id,
            attempt=request.attempt,
            epoch=self.epoch,
            reason=finish.reason,
            ends=finish.ends,
            tokens=tuple(len(choice.ids) for choice in attempt.choices),
            prompt_tokens=finish.prompt_tokens,
            cached_tokens=finish.cached_tokens,
            completion_tokens=finish.completion_tokens,
            error=finish.error,
        )

    def all(self, attempt: Attempt) -> list[Entry]:
        """Everything of an attempt, from its beginning."""
        if attempt.finish is not None and attempt.finish.refusal is not None:
            return [self.ending(attempt, attempt.finish)]
        entries: list[Entry] = [self.accepted(attempt)]
        entries += [self.whole(attempt, index) for index in range(len(attempt.choices))]
        if attempt.finish is not None:
            entries.append(self.ending(attempt, attempt.finish))
        return entries

    def unknown(self, attach: Attach) -> Refused:
        """For an Attach to what this shard doesn't have (any more)."""
        return self._refused(attach.request_id, attach.attempt, UNKNOWN)

    def _refused(self, request_id: str, attempt: int, refusal: Refusal) -> Refused:
        return Refused(
            request_id=request_id,
            attempt=attempt,
            epoch=self.epoch,
            status=refusal.status,
            code=refusal.code,
            message=refusal.message,
            param=refusal.param,
            retry_after_s=refusal.retry_after_s,
            elsewhere=refusal.elsewhere,
        )


UNKNOWN = Refusal(
    status=404,
    code="request_not_found",
    message="The engine's shard doesn't know this request: it ended more than a minute ago, or never began.",
)


def frames(replies: Iterable[tuple[ReplyTo, Entry]]) -> list[Reply]:
    """Entries, in order, grouped into one record a reader."""
    grouped: dict[ReplyTo, list[Entry]] = {}
    for reader, entry in replies:
        grouped.setdefault(reader, []).append(entry)
    return [
        Reply(
            region=reader.region,
            frames=Frames(slot=reader.slot, incarnation=reader.incarnation, entries=tuple(entries)),
        )
        for reader, entries in grouped.items()
    ]


def stripped(request: Request) -> Request:
    """A request without its prompt, for the journal of one that is never run."""
    body = Body(sampling=request.body.sampling, n=request.body.n, max_tokens=request.body.max_tokens)
    return msgspec.structs.replace(request, body=body, prefix_chain=())


def span_of(emission: Emission) -> Span:
    """An emission as the journal has it."""
    return Span(
        emission.key.ref,
        emission.choice,
        emission.first,
        emission.ids,
        emission.logprobs,
        emission.end,
        emission.prompt,
    )


def overall(ends: Sequence[ChoiceEnd | None]) -> FinishReason:
    """The reason of a request whose choices have all ended: `length` if any was cut, else the first one's."""
    if "length" in ends:
        return "length"
    return next((end for end in ends if end is not None), "stop")
