"""A request's life, moment by moment, with time passed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ingress_stream import FLEET, accepted, delta, end, refused

from ingress.life import Effect, Failed, Life, Patience, Publish, SendAttach, SendCancel, Target
from wire.messages import End

A, B, C = (Target(FLEET, shard) for shard in range(3))
PATIENCE = Patience(accept_ms=20_000, attempt_ms=5_000, request_ms=600_000)


class World:
    """A life that started at time 0 on shard A, with `others` to go to."""

    def __init__(self, others: Sequence[Target] = (), *, away: bool = False, **patience: Any) -> None:
        self.others = list(others)
        self.away = away
        known = {name: getattr(PATIENCE, name) for name in PATIENCE.__slots__}
        self.life = Life(1, Patience(**{**known, **patience}), 0, self._elsewhere, lambda: self.away)
        assert self.life.start(0, A) == [Publish(1, A)]

    def _elsewhere(self, tried: frozenset[Target]) -> Target | None:
        return next((target for target in self.others if target not in tried), None)

    def at(self, now_ms: float) -> list[Effect]:
        return self.life.tick(now_ms)

    def status(self, effects: list[Effect]) -> int:
        assert isinstance(effects[-1], Failed)
        assert self.life.done
        return effects[-1].error.status


def test_nothing_is_due_before_its_time() -> None:
    w = World([B])
    w.life.acked(1)
    assert w.life.due_ms() == 5_000
    assert w.at(4_999) == []


def test_an_attempt_nobody_accepts_moves_new_first_then_the_old_is_cancelled() -> None:
    w = World([B])
    w.life.acked(1)
    assert w.at(5_000) == [Publish(2, B), SendCancel(1, A, "moved")]
    assert w.life.entries(5_001, [accepted(attempt=1, epoch=99)]) == [], "the old attempt's word counts no more"
    assert w.life.entries(5_002, [accepted(attempt=2)]) == [accepted(attempt=2)]


def test_with_nowhere_to_go_it_waits_and_in_the_end_gives_up_unbilled() -> None:
    w = World()
    w.life.acked(1)
    for now_ms in range(0, 20_000, 1_000):
        assert w.at(now_ms) == []
    effects = w.at(20_000)
    assert effects[0] == SendCancel(1, A, "gave_up")
    assert w.status(effects) == 503


def test_it_moves_only_so_often() -> None:
    w = World([B, C], attempts=2)
    w.life.acked(1)
    assert w.at(5_000)[0] == Publish(2, B)
    w.life.acked(2)
    assert w.at(10_000) == []


def test_a_lost_engines_attempt_moves_as_if_its_time_were_up() -> None:
    w = World([B, C])
    w.life.acked(1)
    assert w.life.lost(1_700) == [Publish(2, B), SendCancel(1, A, "moved")]
    assert w.life.entries(1_701, [accepted(), delta(0, (9,))]) == [], "it thawed: its word counts no more"
    assert w.life.due_ms() == 6_700, "the next attempt has its own time"
    assert w.life.lost(1_900) == [Publish(3, C), SendCancel(2, B, "moved")], "and its own engine, which may be lost too"


def test_what_a_lost_engine_accepted_stays_token_or_not() -> None:
    w = World([B])
    w.life.entries(1, [accepted()])
    assert w.life.lost(1_700) == []
    w.life.entries(1_701, [delta(0, (1,))])
    assert w.life.lost(3_000) == []
    assert w.life.entries(12_000, [delta(0, (1, 2), epoch=9)]) != [], "the shard's next owner goes on"
    w.life.give_up()
    assert w.life.lost(13_000) == []


def test_who_may_not_leave_a_lost_engine_waits_as_ever_and_does_not_ask_at_each_look() -> None:
    w = World()
    w.life.acked(1)
    assert w.life.lost(1_700) == []
    w.others = [B]
    assert w.life.lost(1_800) == [], "hundreds may wait with it"
    assert w.life.due_ms() == 5_000
    assert w.at(5_000) == [Publish(2, B), SendCancel(1, A, "moved")]


def test_while_the_log_is_away_no_engine_is_lost() -> None:
    w = World([B], away=True)
    assert w.life.lost(1_700) == []
    w.away = False
    assert w.life.lost(1_800)[0] == Publish(2, B)


def test_a_lost_engines_attempt_moves_only_so_often() -> None:
    w = World([B, C], attempts=2)
    assert w.life.lost(1_700)[0] == Publish(2, B)
    assert w.life.lost(1_800) == []


def test_a_refusal_with_hope_elsewhere_moves_at_once_and_cancels_nothing() -> None:
    w = World([B])
    assert w.life.entries(1, [refused(elsewhere=True)]) == [Publish(2, B)]
    assert w.status(w.life.entries(2, [refused(attempt=2, elsewhere=True, status=429)])) == 429


def test_a_refusal_for_good_is_the_clients_answer() -> None:
    w = World([B])
    effects = w.life.entries(1, [refused(status=400, code="context_length_exceeded", param="messages")])
    assert w.status(effects) == 400
    error = effects[-1].error  # type: ignore[union-attr]
    assert (error.code, error.param, error.retry_after_s) == ("context_length_exceeded", "messages", None)


def test_a_log_that_acknowledges_nothing_is_waited_for_as_long_as_it_may_come_back_with_the_request() -> None:
    w = World([B], away=True)
    assert w.at(19_999) == [], "told earlier, the client could be told wrong: the Request may still be run"
    effects = w.at(20_000)
    assert effects[0] == SendCancel(1, A, "gave_up")
    assert w.status(effects) == 503


def test_while_the_log_is_away_another_shard_of_it_is_no_hope() -> None:
    w = World([B])
    w.life.acked(1)
    w.away = True
    assert w.at(5_000) == []
    w.away = False
    assert w.at(10_000)[0] == Publish(2, B)


def test_a_slow_acknowledgement_alone_is_waited_for() -> None:
    w = World()
    assert w.at(3_000) == []
    w.life.acked(1)
    assert w.life.due_ms() == 5_000


def test_what_could_not_be_queued_leaves_nothing_to_cancel() -> None:
    w = World([B])
    effects = w.life.not_queued(1)
    assert len(effects) == 1
    assert w.status(effects) == 503


def test_a_send_of_unknown_outcome_moves_or_fails() -> None:
    assert World([B]).life.send_unknown(10, 1) == [Publish(2, B), SendCancel(1, A, "moved")]
    w = World()
    assert w.status(w.life.send_unknown(10, 1)) == 503
    w = World([B])
    w.life.entries(5, [accepted()])
    assert w.life.send_unknown(10, 1) == [], "its Accepted came: the log has it"


def test_silence_asks_again_ever_more_rarely_until_tokens_come() -> None:
    w = World()
    w.life.entries(0, [accepted()])
    asked = [now_ms for now_ms in range(0, 100_000, 500) if w.at(now_ms) == [SendAttach(1, A)]]
    assert asked[:4] == [5_000, 15_000, 35_000, 75_000]
    w.life.entries(100_000, [delta(0, (1,))])
    assert w.life.due_ms() == 105_000


def test_a_gap_asks_at_once_but_not_for_every_frame_past_it() -> None:
    w = World()
    w.life.entries(0, [accepted(), delta(0, (1,))])
    assert w.life.entries(10, [delta(3, (4,)), delta(4, (5,))]) == [SendAttach(1, A)]
    assert w.life.entries(500, [delta(5, (6,))]) == []
    assert w.life.entries(1_010, [delta(6, (7,))]) == [SendAttach(1, A)]


def test_a_gap_that_nothing_follows_is_asked_about_again() -> None:
    w = World()
    w.life.entries(0, [accepted(), delta(0, (1,))])
    w.life.entries(10, [delta(3, (4,))])
    assert w.at(w.life.due_ms()) == [SendAttach(1, A)]


def test_the_end_is_the_end() -> None:
    w = World()
    w.life.entries(0, [accepted(), delta(0, (1,), end="stop")])
    assert w.life.entries(1, [end((1,)), end((1,))]) == [end((1,))]
    assert w.life.done
    assert w.life.client_gone() == w.life.give_up() == w.at(10**9) == []


@pytest.mark.parametrize(
    ("reason", "status"), [("error", 500), ("timeout", 504), ("expired", 503), ("cancelled", 503), ("moved", 503)]
)
def test_other_endings_are_errors_and_need_no_cancel(reason: Any, status: int) -> None:
    w = World()
    w.life.entries(0, [accepted(), delta(0, (1,))])
    effects = w.life.entries(1, [end((1,), (None,), reason=reason)])
    assert len(effects) == 1
    assert w.status(effects) == status


def test_a_contradiction_ends_it_unbilled() -> None:
    w = World()
    w.life.entries(0, [accepted(), delta(0, (1,))])
    effects = w.life.entries(1, [delta(0, (2,), epoch=2)])
    assert effects[0] == SendCancel(1, A, "gave_up")
    assert w.status(effects) == 500


def test_a_client_that_leaves_pays_for_what_was_generated() -> None:
    w = World()
    w.life.entries(0, [accepted(), delta(0, (1,))])
    assert w.life.client_gone() == [SendCancel(1, A, "client_gone")]
    assert w.life.entries(1, [delta(1, (2,))]) == []


def test_a_deadline_without_an_end_is_told_after_the_owners_grace() -> None:
    w = World()
    w.life.entries(0, [accepted()])
    w.life.entries(604_900, [delta(0, (1,))])
    effects = w.at(605_000)
    assert effects[0] == SendCancel(1, A, "client_gone")
    assert w.status(effects) == 504


Step = st.one_of(
    st.tuples(st.just("tick"), st.integers(0, 12_000)),
    st.tuples(
        st.just("entry"),
        st.sampled_from(
            [
                accepted(),
                accepted(attempt=2),
                delta(0, (1,)),
                delta(0, (1,), attempt=2, epoch=3),
                delta(5, (1,)),
                delta(0, (9,), epoch=2),
                end((1,)),
                end((1,), attempt=2, epoch=3),
                refused(elsewhere=True),
                refused(attempt=2),
            ]
        ),
    ),
    st.tuples(st.just("unknown"), st.integers(1, 3)),
    st.tuples(st.just("lost"), st.none()),
    st.tuples(st.just("gone"), st.none()),
)


@given(st.lists(Step, max_size=25), st.booleans())
def test_every_life_has_at_most_one_ending_and_leaves_no_attempt_running(steps: list[Any], away: bool) -> None:
    w = World([B, C], away=away)
    now_ms, all_effects = 0.0, [Publish(1, A)]
    for kind, value in steps:
        effects: list[Effect] = []
        match kind:
            case "tick":
                now_ms += value
                effects = w.at(now_ms)
            case "entry":
                effects = w.life.entries(now_ms, [value])
            case "unknown":
                effects = w.life.send_unknown(now_ms, value)
            case "lost":
                effects = w.life.lost(now_ms)
            case "gone":
                effects = w.life.client_gone()
        all_effects += effects
    assert sum(isinstance(effect, End | Failed) for effect in all_effects) <= 1
    published = [effect for effect in all_effects if isinstance(effect, Publish)]
    cancelled = [effect.attempt for effect in all_effects if isinstance(effect, SendCancel)]
    assert len(cancelled) == len(set(cancelled)), "an attempt is cancelled once"
    assert [effect.attempt for effect in published] == list(range(1, len(published) + 1))
    for effect in published[:-1]:
        refusals = [value for kind, value in steps if kind == "entry" and value == refused(elsewhere=True)]
        assert effect.attempt in cancelled or refusals, "a left attempt is cancelled unless it was refused"
