"""The shard's state machine, rule by rule. `test_workers_shard_model` throws everything at it at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from shard_world import FLEET, READER, START_MS, Letters, make_request

from wire.journal import Fold
from wire.messages import (
    Accepted,
    Attach,
    Begin,
    Cancel,
    CancelReason,
    Carry,
    Crash,
    Delta,
    End,
    Entry,
    Finish,
    FinishReason,
    Refusal,
    Refused,
    ReplyTo,
    Request,
    Tokens,
    Usage,
    request_ref,
)
from workers.appender import CARRY_AFTER_BYTES, CARRY_AFTER_MS
from workers.effects import Append, Effect, Halt, HaltAll, Identity, Prepared, ReadTail, Reclaim, Reply, Run, SendUsage
from workers.engine.protocol import Emission, Key
from workers.shard import REMEMBER_MS, Shard
from workers.watermark import Hint

RAN = Prepared(prompt=(1, 2, 3), max_tokens=9)


@dataclass
class Bench:
    """A shard, its journal, and what left it."""

    shard: Shard = field(
        default_factory=lambda: Shard(Identity(engine="e", incarnation="i", fleet=FLEET, shard=0), Letters())
    )
    journal: list[object] = field(default_factory=list)
    waiting: list[Append] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)
    others: list[Effect] = field(default_factory=list)
    now_ms: int = START_MS

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Append():
                    self.waiting.append(effect)
                case Reply():
                    self.entries += effect.frames.entries
                case SendUsage():
                    self.usages.append(effect.usage)
                case _:
                    self.others.append(effect)

    def land(self, count: int | None = None) -> None:
        """Acknowledge the next `count` appends, or all."""
        left = len(self.waiting) if count is None else count
        while left and self.waiting:
            append = self.waiting.pop(0)
            self.journal.append(append.record)
            self.do(self.shard.appended(append.term, len(self.journal) - 1))
            left -= 1

    def own(self, starts: int = 0) -> Bench:
        self.do(self.shard.claim("n", "fp", self.now_ms))
        self.land()
        tail = self.others.pop()
        assert isinstance(tail, ReadTail)
        fold = Fold()
        for offset, record in enumerate(self.journal):
            fold.apply(offset, record)  # type: ignore[arg-type]
        self.do(self.shard.tail_read(tail.term, fold, {}, {"requests": starts, "batch": 0}, self.now_ms))
        return self

    def request(self, offset: int, prepared: Prepared | Refusal = RAN, **changes: object) -> Request:
        request = msgspec.structs.replace(make_request(offset, self.now_ms), **changes)
        self.do(self.shard.request("requests", offset, request, prepared, self.now_ms))
        return request

    def emit(self, offset: int, first: int, *ids: int, end: str | None = None, error: str | None = None) -> None:
        epoch = self.shard.epoch
        assert epoch is not None
        text = Letters().render_text(ids, (), None)
        key = Key(0, epoch, request_ref("requests", offset))
        self.do(self.shard.stepped([Emission(key, 0, first, ids, text, None, end, error)], self.now_ms))  # type: ignore[arg-type]

    def committed(self) -> tuple[int, Hint]:
        commits = self.shard.commits()
        assert commits is not None
        return commits["requests"].offset, Hint.parse(commits["requests"].metadata)

    def kinds(self) -> list[str]:
        return [type(record).__name__ for record in self.journal]

    def finish(self) -> Finish:
        return next(r for r in self.journal if isinstance(r, Finish))


@pytest.fixture
def bench() -> Bench:
    return Bench().own()


def test_acceptance_is_told_only_once_begin_is_in_the_journal(bench: Bench) -> None:
    bench.request(0)
    assert bench.entries == []
    assert bench.committed()[0] == 0, "the request would be read again"
    bench.land()
    assert isinstance(bench.entries[0], Accepted)
    assert bench.committed() == (1, Hint(1, 0)), "its Begin, at offset 1 after the Claim, is what a new owner needs"


def test_tokens_leave_only_once_they_are_in_the_journal(bench: Bench) -> None:
    bench.request(0)
    bench.emit(0, 0, 5)
    bench.land(1)
    assert not any(isinstance(e, Delta) for e in bench.entries)
    bench.land()
    assert [e.ids for e in bench.entries if isinstance(e, Delta)] == [(5,)]


def test_one_step_of_many_requests_is_one_record(bench: Bench) -> None:
    for offset in range(3):
        bench.request(offset)
    epoch = bench.shard.epoch or 0
    step = [Emission(Key(0, epoch, request_ref("requests", o)), 0, 0, (o,), "x") for o in range(3)]
    bench.do(bench.shard.stepped(step, bench.now_ms))
    bench.land()
    assert bench.kinds()[-4:] == ["Begin", "Begin", "Begin", "Tokens"]


def test_an_ending_releases_end_and_usage_after_its_finish(bench: Bench) -> None:
    bench.request(0)
    bench.emit(0, 0, 5, end="stop")
    bench.land()
    assert bench.kinds() == ["Claim", "Begin", "Tokens", "Finish"]
    end = bench.entries[-1]
    assert isinstance(end, End)
    assert (end.reason, end.tokens, end.prompt_tokens) == ("stop", (1,), 3)
    assert [(u.begin_offset, u.finish_offset, u.completion_tokens) for u in bench.usages] == [(1, 3, 1)]


def test_a_gap_in_acknowledged_offsets_drops_everything_unreleased(bench: Bench) -> None:
    bench.request(0)
    bench.land()
    bench.emit(0, 0, 5)
    bench.journal.append("a foreign record")
    bench.entries.clear()
    bench.land()
    assert bench.entries == []
    assert bench.shard.phase == "idle"
    assert [type(e) for e in bench.others[-2:]] == [HaltAll, Reclaim]


def test_a_send_of_unknown_outcome_is_treated_as_a_gap(bench: Bench) -> None:
    bench.request(0)
    bench.do(bench.shard.append_failed(bench.shard.term))
    assert (bench.shard.phase, type(bench.others[-1])) == ("idle", Reclaim)


def test_acknowledgements_of_an_earlier_term_say_nothing(bench: Bench) -> None:
    bench.request(0)
    stale = bench.waiting.pop()
    bench.do(bench.shard.append_failed(stale.term))
    bench.do(bench.shard.claim("again", "fp", bench.now_ms))
    assert bench.shard.appended(stale.term, 1) == []
    assert bench.shard.phase == "claiming"


def test_a_new_owner_tells_everything_from_position_zero_and_goes_on(bench: Bench) -> None:
    bench.request(0)
    bench.emit(0, 0, 5, 6)
    bench.land()
    heir = Bench(journal=bench.journal).own(starts=1)
    accepted, delta = heir.entries
    assert isinstance(accepted, Accepted)
    assert isinstance(delta, Delta)
    assert (delta.first, delta.ids, delta.text, delta.epoch) == (0, (5, 6), "fg", 3)
    run = heir.others[-1]
    assert isinstance(run, Run)
    assert run.attempt.choices[0].ids == [5, 6]
    heir.emit(0, 2, 7, end="length")
    heir.land()
    assert heir.usages[-1].completion_tokens == 3


def test_a_new_owner_sends_the_usage_of_every_finish_again(bench: Bench) -> None:
    bench.request(0)
    bench.emit(0, 0, 5, end="stop")
    bench.land()
    heir = Bench(journal=bench.journal).own(starts=1)
    assert heir.usages == bench.usages
    assert isinstance(heir.entries[-1], End), "its End may have been lost with the old owner"


def test_a_choice_that_had_ended_is_finished_not_run_again(bench: Bench) -> None:
    bench.request(0)
    bench.emit(0, 0, 5, end="stop")
    bench.land(2)  # Begin and Tokens, but not the Finish
    heir = Bench(journal=bench.journal).own(starts=1)
    heir.land()
    assert heir.finish().reason == "stop"
    assert not any(isinstance(e, Run) for e in heir.others)


def test_a_request_read_again_is_not_run_again(bench: Bench) -> None:
    bench.request(0)
    bench.land()
    heir = Bench(journal=bench.journal).own(starts=0)
    heir.do(heir.shard.request("requests", 0, make_request(0, heir.now_ms), RAN, heir.now_ms))
    heir.land()
    assert heir.kinds().count("Begin") == 1
    assert heir.committed()[0] == 1


def test_a_request_delivered_twice_runs_once(bench: Bench) -> None:
    request = bench.request(0)
    bench.do(bench.shard.request("requests", 1, request, RAN, bench.now_ms))
    bench.land()
    assert bench.kinds().count("Begin") == 1
    assert bench.committed()[0] == 2


def test_a_request_read_after_its_time_expires_without_its_prompt(bench: Bench) -> None:
    bench.request(0, accept_by_ms=bench.now_ms - 1)
    bench.land()
    begin = next(r for r in bench.journal if isinstance(r, Begin))
    assert begin.request.body.messages == ()
    assert bench.finish().reason == "expired"
    assert bench.usages[0].completion_tokens == 0


def test_a_refusal_is_journaled_before_it_is_told(bench: Bench) -> None:
    refusal = Refusal(status=400, code="context_length_exceeded", message="too long", param="messages")
    bench.request(0, refusal)
    assert bench.entries == []
    bench.land()
    told = bench.entries[-1]
    assert isinstance(told, Refused)
    assert (told.status, told.code, told.param) == (400, "context_length_exceeded", "messages")
    assert bench.finish().refusal == refusal
    heir = Bench(journal=bench.journal).own(starts=1)
    assert heir.entries == [msgspec.structs.replace(told, epoch=heir.shard.epoch)]


@pytest.mark.parametrize(
    ("reason", "ending"), [("client_gone", "cancelled"), ("gave_up", "expired"), ("moved", "moved")]
)
def test_a_cancel_frees_the_slot_at_once_and_ends_once(
    bench: Bench, reason: CancelReason, ending: FinishReason
) -> None:
    request = bench.request(0)
    bench.emit(0, 0, 5)
    cancel = Cancel(request_id=request.request_id, attempt=1, reason=reason, accept_by_ms=request.accept_by_ms)
    bench.do(bench.shard.cancel("requests", 1, cancel, bench.now_ms))
    assert isinstance(bench.others[-1], Halt)
    bench.emit(0, 1, 6)  # was on its way
    bench.do(bench.shard.cancel("requests", 2, cancel, bench.now_ms))
    assert bench.committed()[0] == 0
    bench.land()
    assert bench.kinds() == ["Claim", "Begin", "Tokens", "Finish"]
    assert (bench.finish().reason, bench.finish().completion_tokens) == (ending, 1)
    assert bench.committed()[0] == 3


def test_a_cancel_that_overtakes_its_request_waits_for_it(bench: Bench) -> None:
    request = make_request(1, bench.now_ms)
    cancel = Cancel(request_id="r1", attempt=1, reason="client_gone", accept_by_ms=request.accept_by_ms)
    bench.do(bench.shard.cancel("requests", 0, cancel, bench.now_ms))
    assert bench.committed()[0] == 0, "its effect is still to come"
    bench.do(bench.shard.request("requests", 1, request, RAN, bench.now_ms))
    bench.land()
    assert bench.finish().reason == "cancelled"
    assert not any(isinstance(e, Run) for e in bench.others)
    assert bench.committed()[0] == 2


def test_a_cancel_for_nothing_is_forgotten_when_its_request_could_only_expire(bench: Bench) -> None:
    cancel = Cancel(request_id="r1", attempt=1, reason="gave_up", accept_by_ms=bench.now_ms + 100)
    bench.do(bench.shard.cancel("requests", 0, cancel, bench.now_ms))
    bench.do(bench.shard.tick(bench.now_ms + 101))
    assert bench.committed()[0] == 1


def test_the_hint_covers_requests_behind_a_waiting_cancel(bench: Bench) -> None:
    cancel = Cancel(request_id="unknown", attempt=1, reason="gave_up", accept_by_ms=bench.now_ms + 20_000)
    bench.do(bench.shard.cancel("requests", 0, cancel, bench.now_ms))
    bench.request(1)
    bench.emit(1, 0, 5, end="stop")
    bench.land()
    offset, hint = bench.committed()
    assert (offset, hint.offset) == (0, 1), "request 1 will be read again, so its Begin must be found"


def test_attach_is_answered_with_everything_once_it_is_acknowledged(bench: Bench) -> None:
    request = bench.request(0)
    bench.emit(0, 0, 5, 6)
    other = ReplyTo(region="local", slot=3, incarnation="b")
    bench.do(bench.shard.attach("requests", 1, Attach(request_id=request.request_id, attempt=1, reply=other)))
    assert bench.entries == []
    bench.land()
    assert [type(e) for e in bench.entries] == [Accepted, Delta, Accepted, Delta]
    assert bench.shard.readers() == {other: [request_ref("requests", 0)]}


def test_attach_to_what_is_unknown_says_so(bench: Bench) -> None:
    bench.do(bench.shard.attach("requests", 0, Attach(request_id="r9", attempt=1, reply=READER)))
    told = bench.entries[-1]
    assert isinstance(told, Refused)
    assert (told.status, told.code) == (404, "request_not_found")


def test_the_third_death_ends_a_request_and_the_second_isolates_it(bench: Bench) -> None:
    bench.request(0)
    ref = request_ref("requests", 0)
    alone = []
    for _ in range(2):
        bench.do(bench.shard.engine_died(frozenset([ref]), bench.now_ms))
        run = bench.others[-1]
        assert isinstance(run, Run)
        alone.append(run.alone)
    assert alone == [False, True]
    bench.do(bench.shard.engine_died(frozenset([ref]), bench.now_ms))
    bench.land()
    assert sum(isinstance(r, Crash) for r in bench.journal) == 3
    assert bench.finish().reason == "error"
    assert "3 times" in (bench.finish().error or "")


def test_cached_tokens_are_counted_once_and_by_whoever_spoke_first(bench: Bench) -> None:
    request, ref = bench.request(0), request_ref("requests", 0)

    def emit(first: int, cached: int | None, end: str | None = None) -> None:
        key = Key(0, bench.shard.epoch or 0, ref)
        emission = Emission(key, 0, first, (5,), "f", None, end, cached_tokens=cached)  # type: ignore[arg-type]
        bench.do(bench.shard.stepped([emission], bench.now_ms))

    emit(0, 64)
    bench.land()
    bench.own(1)  # a takeover, whose engine had more of the prompt in its cache, or less
    emit(1, 128)
    emit(2, 0, end="stop")
    bench.land()
    assert [record.cached for record in bench.journal if isinstance(record, Tokens)] == [((ref, 64),), (), ()]
    assert (bench.finish().cached_tokens, bench.usages[-1].cached_tokens) == (64, 64)
    ends = [entry for entry in bench.entries if isinstance(entry, End)]
    assert [(end.request_id, end.cached_tokens) for end in ends] == [(request.request_id, 64)]
    assert [entry.cached_tokens for entry in bench.entries if isinstance(entry, Accepted)] == [0, 64]


def test_what_only_waited_is_not_suspected(bench: Bench) -> None:
    bench.request(0)
    bench.request(1)
    bench.do(bench.shard.engine_died(frozenset([request_ref("requests", 0)]), bench.now_ms))
    bench.land()
    assert next(r for r in bench.journal if isinstance(r, Crash)).refs == (request_ref("requests", 0),)
    assert sum(isinstance(e, Run) for e in bench.others) == 4, "both are given to the engine again"


def test_one_bad_request_fails_alone(bench: Bench) -> None:
    bench.request(0)
    bench.request(1)
    bench.emit(0, 0, error="cannot be sampled")
    bench.land()
    assert [(r.ref, r.reason) for r in bench.journal if isinstance(r, Finish)] == [(0, "error")]
    assert len(bench.shard.open_attempts) == 1


def test_a_deadline_ends_in_timeout(bench: Bench) -> None:
    bench.request(0, deadline_ms=bench.now_ms + 10)
    bench.do(bench.shard.tick(bench.now_ms + 11))
    bench.land()
    assert bench.finish().reason == "timeout"


def test_a_vanished_reader_ends_its_requests_but_not_those_in_the_background(bench: Bench) -> None:
    bench.request(0)
    bench.request(1, background=True)
    bench.do(bench.shard.vanished(READER, bench.now_ms))
    bench.land()
    assert [(r.ref, r.reason) for r in bench.journal if isinstance(r, Finish)] == [(0, "cancelled")]


@pytest.mark.parametrize("by", ["age", "size"])
def test_what_is_old_and_still_needed_is_carried(bench: Bench, by: str) -> None:
    bench.request(0)
    bench.emit(0, 0, 5)
    bench.land()
    if by == "age":
        bench.now_ms += CARRY_AFTER_MS + 1
    else:
        bench.shard.written(CARRY_AFTER_BYTES + 1)
    bench.do(bench.shard.tick(bench.now_ms))
    assert bench.committed()[1].offset == 1, "until the Carry is acknowledged, the Begin is needed"
    bench.land()
    carry = bench.journal[-1]
    assert isinstance(carry, Carry)
    assert carry.spans[0].ids == (5,)
    assert bench.committed()[1] == Hint(3, 0)
    bench.emit(0, 1, 6, end="stop")
    bench.land()
    fold = Fold(epoch=0)
    for offset in range(3, len(bench.journal)):
        fold.apply(offset, bench.journal[offset])  # type: ignore[arg-type]
    assert fold.attempts[request_ref("requests", 0)].choices[0].ids == [5, 6]


def test_while_a_carry_is_on_its_way_none_follows_it(bench: Bench) -> None:
    """The log is away for long. A second Carry made the hint forget, once the first was there, that it was needed."""
    bench.request(0)
    bench.land()
    for _ in range(3):
        bench.now_ms += CARRY_AFTER_MS + 1
        bench.do(bench.shard.tick(bench.now_ms))
    bench.emit(0, 0, 5)
    assert [type(append.record) for append in bench.waiting] == [Carry, Tokens]
    assert bench.committed()[1].offset == 1
    bench.land(1)
    assert bench.committed()[1].offset == 2


def test_a_finish_whose_usage_is_not_acknowledged_is_carried_and_later_forgotten(bench: Bench) -> None:
    bench.request(0)
    bench.emit(0, 0, 5, end="stop")
    bench.land()
    bench.now_ms += CARRY_AFTER_MS + 1
    bench.do(bench.shard.tick(bench.now_ms))
    bench.land()
    carry = bench.journal[-1]
    assert isinstance(carry, Carry)
    assert (carry.finish, carry.finish_offset) == (bench.finish(), 3)
    heir = Bench(journal=bench.journal[4:], now_ms=bench.now_ms)
    assert bench.usages[0].finish_offset == 3
    bench.shard.usage_sent(bench.shard.term, request_ref("requests", 0))
    bench.do(bench.shard.tick(bench.now_ms + REMEMBER_MS))
    assert bench.committed()[1].offset == len(bench.journal)
    assert heir.kinds() == ["Carry"]


def test_crashing_at_every_step_of_a_request_loses_and_doubles_nothing() -> None:
    """Kill the owner after each single acknowledgement and each single input of a request's life."""
    for cut in range(12):
        first = Bench().own()
        script = [
            lambda b: b.request(0),
            lambda b: b.land(1),
            lambda b: b.emit(0, 0, 5),
            lambda b: b.emit(0, 1, 6),
            lambda b: b.land(1),
            lambda b: b.land(1),
            lambda b: b.emit(0, 2, 7, end="length"),
            lambda b: b.land(1),
            lambda b: b.land(1),
        ]
        commit = 0
        for step in script[:cut]:
            step(first)
            commit = first.committed()[0]
        told = [i for e in first.entries if isinstance(e, Delta) for i in e.ids]
        heir = Bench(journal=list(first.journal)).own(starts=commit)
        if commit == 0:
            heir.do(heir.shard.request("requests", 0, make_request(0, heir.now_ms), RAN, heir.now_ms))
        have = heir.shard.open_attempts[0].choices[0].ids if heir.shard.open_attempts else None
        for position in range(len(have) if have is not None else 3, 3):
            heir.emit(0, position, 5 + position, end="length" if position == 2 else None)
        heir.land()
        assert heir.kinds().count("Begin") == 1, cut
        assert heir.kinds().count("Finish") == 1, cut
        ids = [i for r in heir.journal if isinstance(r, Tokens) for s in r.spans for i in s.ids]
        assert ids == [5, 6, 7], cut
        assert ids[: len(told)] == told, cut
        assert {u.completion_tokens for u in heir.usages} == {3}, cut
