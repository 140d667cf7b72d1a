"""Choices made again from what the log tells."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from routing_world import MODEL, NOW_MS, Ingress, candidates, equal, fleet, signal, snapshot
from usages import usage

from routing.board import Candidate
from routing.hindsight import Hindsight, hindsight
from routing.replay import OPEN_MS, SNAPSHOTS, Decision, Ended, Moment, Sent, in_order, moments, regret, replay
from wire.messages import DemandSignal, Dispatch, Dispatches, EngineSignal, Snapshot, Usages

A, B = candidates(2)
BUSY: dict[str, Any] = {"queued_requests": 9, "queued_tokens": 90_000}


def dispatch(shard: int = 0, name: str = "request-0", **fields: Any) -> Dispatch:
    known: dict[str, Any] = {
        "model": MODEL,
        "fleet": fleet(),
        "shard": shard,
        "prompt_tokens_estimate": 100,
        "request_id": name,
        "at_ms": NOW_MS,
        "reason": "loss",
        "snapshot_version": 7,
    }
    return Dispatch(**(known | fields))


def told(*whats: EngineSignal | Snapshot | Ended | Dispatch, at_ms: float = NOW_MS) -> list[Moment]:
    return [
        Moment(at_ms, Sent(ingress="local/0", dispatch=what) if isinstance(what, Dispatch) else what) for what in whats
    ]


def again(*whats: EngineSignal | Snapshot | Ended | Dispatch, **options: Any) -> list[Decision]:
    return list(replay(told(*whats), "local", **options))


def test_a_choice_is_made_again_as_an_ingress_that_knew_the_same_made_it() -> None:
    engines = [signal(0, **BUSY), signal(1)]
    ingress = Ingress(*engines, snapshot=equal((A, B)), block_tokens=64)
    choice = ingress.pick(0, (A, B), prompt_tokens=100)
    assert choice is not None
    (one,) = again(*engines, equal((A, B)), dispatch(choice.shard, loss=choice.loss))
    assert one.again == choice
    assert one.alike
    assert one.regret == 0.0
    assert one.chosen == B
    assert one.followed == equal((A, B))
    assert one.engines == {A: "gpu-0", B: "gpu-1"}
    assert [offer.candidate for offer in one.offers] == [A, B]
    assert one.offers[1].loss == pytest.approx(choice.loss)
    assert one.offers[0].loss > one.offers[1].loss
    assert one.offers[0].wait_ms > one.offers[1].wait_ms == 0


def test_the_regret_is_what_the_better_engine_would_have_saved() -> None:
    (one,) = again(signal(0, **BUSY), signal(1), equal((A, B)), dispatch(0))
    busy, idle = one.offers
    assert one.regret == busy.loss - idle.loss > 0
    assert one.alike is False


def test_what_was_sent_a_moment_ago_is_known_at_once() -> None:
    engines = [signal(0), signal(1)]
    first = [dispatch(0, f"request-{n}", prompt_tokens_estimate=5_000) for n in range(9)]
    *_, last = again(*engines, equal((A, B)), *first, dispatch(0, "request-9"))
    assert last.regret is not None
    assert last.regret > 0.01, "nine prompts wait there, though no signal has shown one yet"
    assert last.again is not None
    assert last.again.shard == 1


def test_who_was_tried_is_not_to_be_chosen() -> None:
    (one,) = again(signal(0, **BUSY), signal(1), equal((A, B)), dispatch(0, attempt=2, tried=((fleet(), 1),)))
    assert [offer.able for offer in one.offers] == [True, False]
    assert one.alike
    assert one.regret == 0.0


def test_a_request_is_weighed_by_what_it_needs_and_has_waited() -> None:
    plain = signal(0, features=())
    (one,) = again(plain, signal(1, **BUSY), equal((A, B)), dispatch(1, features=("tools",), waited_ms=1_900))
    assert [offer.able for offer in one.offers] == [False, True]
    (fresh,) = again(plain, signal(1, **BUSY), equal((A, B)), dispatch(1, features=("tools",)))
    assert fresh.offers[1].loss < one.offers[1].loss


def test_candidates_are_those_of_the_version_that_was_drawn() -> None:
    other = signal(0, fleet=fleet(version="2"), engine="new-0")
    weights = snapshot({A: 0.5, B: 0.25, Candidate(fleet(version="2"), 0): 0.25})
    (one,) = again(other, signal(0), signal(1), weights, dispatch(1))
    assert {offer.candidate for offer in one.offers} == {A, B}
    assert [offer.weight for offer in one.offers] == pytest.approx([2 / 3, 1 / 3])


def test_a_request_that_may_not_leave_stays_in_its_region() -> None:
    far = Candidate(fleet(region="far"), 0)
    weights = snapshot({A: 0.5, far: 0.5})
    (one,) = again(signal(0), signal(0, region="far"), weights, dispatch(0, residency="local"), trips_ms={"far": 90.0})
    assert {offer.candidate: offer.able for offer in one.offers} == {far: False, A: True}


def test_where_nothing_was_known_there_is_nothing_to_regret() -> None:
    (blind,) = again(dispatch(0, reason="hashed", snapshot_version=None))
    assert (blind.again, blind.alike, blind.regret, blind.offers, blind.followed) == (None, None, None, (), None)
    (unknown,) = again(signal(0), equal((A,)), dispatch(5))
    assert unknown.regret is None, "nobody has named that shard"
    assert unknown.alike is False


def test_the_last_sound_snapshot_of_the_region_is_followed() -> None:
    bad = snapshot({A: 0.9, B: 0.9})
    foreign = msgspec.structs.replace(snapshot({B: 1.0}), region="far")
    (one,) = again(signal(0), signal(1), snapshot({A: 1.0}), bad, foreign, dispatch(0))
    assert [offer.candidate for offer in one.offers] == [A]


def test_the_snapshot_that_was_followed_is_shown_for_as_long_as_it_is_remembered() -> None:
    def follow(version: int) -> Snapshot | None:
        published = [msgspec.structs.replace(equal((A, B)), version=number) for number in range(SNAPSHOTS + 1)]
        (one,) = again(signal(0), *published, dispatch(0, snapshot_version=version))
        return one.followed

    assert follow(0) is None
    assert all((found := follow(version)) is not None and found.version == version for version in (1, SNAPSHOTS))


def test_only_what_is_wanted_is_weighed_and_all_of_it_counts() -> None:
    whats = [signal(0), signal(1, shards=()), equal((A, B)), dispatch(0, "a"), dispatch(0, "b"), dispatch(0, "")]
    assert [one.dispatch.request_id for one in again(*whats)] == ["a", "b"]
    (one,) = again(*whats, wanted=lambda sent: sent.request_id == "b")
    assert one.dispatch.request_id == "b"
    assert one.offers[0].wait_ms > 0, "the first one is there"


def ended(name: str, **fields: Any) -> Ended:
    known: dict[str, Any] = {"model": MODEL, "name": (name, 1), "outcome": "answered", "tokens": 9}
    return Ended(**(known | fields))


def test_what_is_over_makes_room_at_once() -> None:
    full = [signal(0, slots=4), equal((A,)), *(dispatch(0, f"r{n}", prompt_tokens_estimate=1) for n in range(9))]
    over = [ended(f"r{n}") for n in range(8)]
    waits_ms = [again(*full, *some, dispatch(0, "last"))[-1].offers[0].wait_ms for some in ([], over)]
    assert waits_ms[1] < waits_ms[0] / 4, "one of nine is left, and four have a slot"


def test_endings_in_error_are_held_against_the_engine() -> None:
    first = [signal(0), signal(1), equal((A, B)), dispatch(0, "r")]
    losses = [
        again(*first, ended("r", outcome=outcome), dispatch(0, "last"))[-1].offers[0].loss
        for outcome in ("answered", None, "failed")
    ]
    assert losses[2] - losses[0] == pytest.approx(0.5, abs=0.001), "1 − 2^−1"
    assert losses[1] == pytest.approx(losses[0], abs=0.001)


def test_how_long_answers_get_is_learned_from_those_that_ended() -> None:
    busy = [signal(0, running=40, slots=32), equal((A,)), *(dispatch(0, f"r{n}") for n in range(64))]
    over = [ended(f"r{n}", tokens=2_000) for n in range(64)]
    short = [ended(f"r{n}", tokens=2) for n in range(64)]
    waits_ms = [again(*busy, *some, dispatch(0, "last"))[-1].offers[0].wait_ms for some in (short, over)]
    assert waits_ms[1] > 2 * waits_ms[0], "until a slot is free"


def test_what_no_ending_is_heard_of_is_over_some_day() -> None:
    early = told(signal(0), equal((A,)), *(dispatch(0, f"r{n}") for n in range(50)))
    later = [
        told(signal(0, at_ms=round(at_ms)), dispatch(0, "long", prompt_tokens_estimate=90_000), at_ms=at_ms)
        for at_ms in (NOW_MS + OPEN_MS + 1, NOW_MS + OPEN_MS + 1_000)
    ]
    *_, before, after = replay([*early, *later[0], *later[1]], "local")
    assert after.offers[0].loss < before.offers[0].loss - 5, "fifty would have waited for that prompt"


def test_records_are_moments_in_order_of_time() -> None:
    late = Dispatches(ingress="i", incarnation="x", at_ms=NOW_MS + 9, sent=(dispatch(0), dispatch(1, at_ms=None)))
    demand = DemandSignal(ingress="i", slot=0, incarnation="x", region="local", model="", at_ms=NOW_MS)
    found = in_order(
        moment
        for message, logged_ms in (
            (late, NOW_MS + 10),
            (signal(0), NOW_MS),
            (equal((A,)), NOW_MS + 1),
            (demand, 0),
            (Usages(entries=(usage("r", reason="moved"),)), NOW_MS + 5),
        )
        for moment in moments(message, logged_ms)
    )
    assert [(at_ms - NOW_MS, type(what)) for at_ms, what in found] == [
        (0, EngineSignal),
        (0, Sent),
        (1, Snapshot),
        (5, Ended),
        (9, Sent),
    ]
    over = Ended(model="simulated", name=("r", 1), outcome="timed_out", tokens=7)
    assert found[3].what == over


def test_one_that_was_not_able_and_would_have_lost_less_is_no_regret() -> None:
    (one,) = again(signal(0), signal(1, **BUSY), equal((A, B)), dispatch(0, tried=((fleet(), 0),)))
    assert [offer.able for offer in one.offers] == [False, True]
    assert one.offers[0].loss < one.offers[1].loss
    assert regret(one.offers, A) == one.regret == 0.0


def summed(*whats: EngineSignal | Snapshot | Dispatch) -> Hindsight:
    (found,) = hindsight(again(*whats))
    return found


def test_many_choices_come_to_figures_a_model() -> None:
    sent = [dispatch(0, f"request-{n}", prompt_tokens_estimate=1) for n in range(3)]
    found = summed(signal(0, **BUSY), signal(1), equal((A, B)), *sent, dispatch(1, "good", cached_tokens=40))
    assert (found.model, found.decisions, found.weighed, found.reasons) == (MODEL, 4, 4, {"loss": 4})
    assert found.alike == 0.25
    assert (found.cached_tokens, found.prompt_tokens) == (40, 103)
    assert found.regret_worst == found.regret_p99
    assert found.regret_mean is not None
    assert found.regret_worst is not None
    assert 0 < found.regret_mean <= found.regret_worst
    assert str(found.worst_request_id).startswith("request-")
    assert found.swing is None, "one window has nothing to swing to"


def test_what_could_not_be_weighed_is_counted_and_no_more() -> None:
    found = summed(dispatch(0, reason="hashed", snapshot_version=None))
    assert (found.decisions, found.weighed, found.alike) == (1, 0, None)
    assert (found.regret_mean, found.regret_p99, found.regret_worst, found.worst_request_id) == (None,) * 4


def test_models_are_apart_and_shares_that_change_sides_swing() -> None:
    sent = [
        Moment(NOW_MS + n * 30_000.0, Sent(ingress="i", dispatch=dispatch(n % 2, f"r{n}", model=name)))
        for n in range(4)
        for name in ("a", "b")
    ]
    first, second = hindsight(replay(sent, "local"))
    assert (first.model, second.model) == ("a", "b")
    assert first.swing == 1.0, "shares of 1, 0, 1, 0: they deviate by a half, and an even share is a half"
