"""Where requests go and how they get there: router, siblings, sender, pulse."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from ingress_world import FLEET, MODEL, SHARDS, signal

from ingress.catalogue import targets
from ingress.errors import ApiError
from ingress.life import Target
from ingress.metrics import Metrics
from ingress.pulse import AWAY_MS, BEATS, Pulse
from ingress.router import Router, Weights
from ingress.sender import Parcel, Sender
from routing.policy import Policy
from routing.shed import PATIENCE_MS
from wire.bus import Partition, Record
from wire.clock import ManualClock
from wire.codec import decode
from wire.errors import BusError, SendUnknown, Unavailable
from wire.fleet import Fleet
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog
from wire.messages import (
    Body,
    Cancel,
    Dispatch,
    Dispatches,
    End,
    Model,
    ModelVersion,
    Refused,
    ReplyTo,
    Request,
    Route,
    Sampling,
    Snapshot,
    StepCost,
)
from wire.topics import FleetTopics, all_topics

A, B = (Target(FLEET, shard) for shard in range(SHARDS))
RECORD = Record(topic="t", partition=0, offset=0, key=None, value=None, timestamp_ms=0)


def request(name: str = "r", **fields: Any) -> Request:
    known: dict[str, Any] = {
        "request_id": name,
        "attempt": 1,
        "tenant": "t",
        "project": "p",
        "key_id": "k",
        "model": MODEL,
        "version": "1",
        "body": Body(sampling=Sampling(seed=1), prompt="x"),
        "reply": ReplyTo(region="local", slot=0, incarnation="i"),
        "created_ms": 0,
        "accept_by_ms": 1,
        "deadline_ms": 2,
    }
    return Request(**{**known, **fields})


def cancel(name: str = "r") -> Cancel:
    return Cancel(request_id=name, attempt=1, reason="gave_up", accept_by_ms=1)


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics()
        self.weights = Weights("local")
        self.router = Router(self.weights, "me", self.metrics, self.clock, {})

    def hear(self, **fields: Any) -> None:
        heard = msgspec.structs.replace(signal(self.clock), **fields)  # type: ignore[arg-type]
        self.router.heard(heard, RECORD)

    def snapshot(self, *weights: float, **fields: Any) -> None:
        routes = tuple(
            Route(fleet=FLEET, shard=shard, engine=f"e{shard}", weight=weight) for shard, weight in enumerate(weights)
        )
        known: dict[str, Any] = {
            "model": MODEL,
            "region": "local",
            "version": 1,
            "created_ms": self.clock.now_ms(),
            "routes": routes,
        }
        self.weights.changed(f"local/{MODEL}", Snapshot(**{**known, **fields}))

    def chosen(self, count: int = 200) -> set[Target]:
        return {t for i in range(count) if (t := self.router.first(request(f"r{i}"), (A, B))) is not None}


def test_without_any_knowledge_requests_spread_and_stay_put() -> None:
    w = World()
    assert w.chosen() == {A, B}
    assert w.router.first(request("x"), (A, B)) == w.router.first(request("x"), (B, A))
    assert w.router.first(request(), ()) is None


def test_weights_are_followed_and_bad_ones_are_not() -> None:
    w = World()
    w.snapshot(0.0, 1.0)
    assert w.chosen() == {B}
    w.snapshot(5.0, float("nan"))
    w.snapshot(0.7, 0.7)
    assert w.chosen() == {B}, "the last good ones stay"
    w.weights.changed("other/" + MODEL, None)
    assert w.weights.snapshots
    w.weights.changed("local/" + MODEL, None)
    assert w.chosen() == {A, B}


def test_a_retry_goes_where_it_was_not_and_only_within_the_budget() -> None:
    w = World()
    one = request()
    assert w.router.elsewhere(one, (A, B), frozenset([A])) == B
    assert w.router.elsewhere(one, (A, B), frozenset([A, B])) is None
    spent = sum(w.router.elsewhere(one, (A, B), frozenset([A])) is not None for _ in range(50))
    assert spent < 10, "without traffic there are only the few in reserve"


def test_silent_engines_are_those_of_the_same_candidates_only() -> None:
    w = World()
    w.hear(engine="e0", shards=(0,))
    w.clock.advance(60_000)
    assert w.router.silent(MODEL, (A, B)) == frozenset(), "no other is heard, so it may be the log"
    w.hear(engine="e1", shards=(1,))
    assert w.router.silent(MODEL, (A, B)) == {A}
    assert w.router.silent(MODEL, (A,)) == w.router.silent("unknown", (A,)) == frozenset()
    w.hear(engine="e0", shards=(0,))
    assert w.router.silent(MODEL, (A, B)) == frozenset()


def test_a_storm_of_retries_is_cut_before_anything_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World()
    for number in range(300):
        w.router.first(request(f"r{number}"), (A, B))
    weighed = []
    choose = Policy.choose
    monkeypatch.setattr(Policy, "choose", lambda *args: weighed.append(args) or choose(*args))
    moved = [w.router.elsewhere(request(f"r{number}"), (A, B), frozenset([A])) for number in range(300)]
    assert 0 < len(weighed) == moved.count(B) <= 33, "a tenth of the first tries, and the reserve"
    assert moved.count(None) == 300 - len(weighed)


def refused(w: World, count: int = 1_000, **fields: Any) -> int:
    """How many of so many requests are answered by 503."""
    found = 0
    for number in range(count):
        try:
            assert w.router.first(request(f"r{number}", **fields), (A, B)) is not None
        except ApiError as error:
            found += (error.status, error.code, error.retry_after_s) == (503, "overloaded", 2)
    return found


def test_what_the_snapshot_sheds_is_503_and_not_of_another_priority() -> None:
    w = World()
    w.snapshot(1.0, shed={"0": 0.5})
    assert 450 < refused(w) < 550
    assert refused(w, priority=1) == 0


def test_who_would_wait_for_longer_than_may_be_is_refused_at_once() -> None:
    w = World()
    w.snapshot(0.5, 0.5)
    step = StepCost(prefill_fixed_ms=0.0, prefill_token_ms=1.0, decode_ms=10.0)
    for shard in (0, 1):
        w.hear(engine=f"e{shard}", shards=(shard,), queued_tokens=2 * round(PATIENCE_MS), queued_requests=9, step=step)
    assert refused(w, 10) == 10
    w.hear(queued_tokens=0, step=step)
    assert refused(w, 10) == 0


def test_an_engine_is_known_by_a_fresh_word_of_its_own_or_a_fresh_route() -> None:
    w = World()
    assert not w.router.engine_known()
    w.hear(state="loading")
    assert not w.router.engine_known()
    w.hear()
    assert w.router.engine_known()
    w.clock.advance(60_000)
    assert not w.router.engine_known()
    w.snapshot(1.0)
    assert w.router.engine_known()
    w.snapshot()
    assert not w.router.engine_known()


def test_an_engine_that_changes_its_primary_is_known_once() -> None:
    w = World()
    w.hear(shards=(0,))
    w.hear(shards=(1, 0))
    board = w.router.policy(MODEL).board
    rows = board.rows((A, B))
    assert board.living(rows, 1_000).tolist() == [False, True]
    w.hear(shards=())
    assert board.living(rows, 1_000).tolist() == [False, False]


def test_what_siblings_sent_counts_until_their_engines_know_it() -> None:
    w = World()
    board = w.router.policy(MODEL).board
    w.hear(shards=(0,))
    for ingress, incarnation in (("a", "other"), ("b", "me")):
        sent = tuple(Dispatch(model=MODEL, fleet=FLEET, shard=0, prompt_tokens_estimate=1) for _ in range(3))
        message = Dispatches(ingress=ingress, incarnation=incarnation, at_ms=w.clock.now_ms(), sent=sent)
        w.router.told(message, RECORD)
    assert board.held(board.rows((A,))).tolist() == [3], "one's own are counted elsewhere"
    w.clock.advance(1_000)
    w.hear(shards=(0,))
    assert board.held(board.rows((A,))).tolist() == [0]


def test_what_is_told_of_an_attempt_says_why_it_went_there() -> None:
    w = World()
    w.clock.advance(5_000)
    body = Body(sampling=Sampling(seed=1), prompt="x" * 400, logprobs=0)
    one = request(body=body, prefix_chain=(1, 2), created_ms=w.clock.now_ms() - 30)
    assert w.router.first(one, (A,)) == A
    told = w.router.sent(one, 1, A)
    assert (told.request_id, told.attempt, told.at_ms, told.waited_ms) == ("r", 1, w.clock.now_ms(), 30)
    assert (told.reason, told.snapshot_version, told.loss, told.cached_tokens) == ("hashed", None, 0.0, 0)
    assert (told.prompt_tokens_estimate, told.prefix_chain, told.features) == (100, (1, 2), ("logprobs",))

    w.snapshot(0.5, 0.5, version=77)
    for shard in (0, 1):
        w.hear(engine=f"e{shard}", shards=(shard,), queued_tokens=50_000 * shard, prefixes_added=(1,))
    assert w.router.first(one, (A, B)) == A
    told = w.router.sent(one, 1, A)
    assert (told.reason, told.snapshot_version, told.cached_tokens, told.tried) == ("affinity", 77, 64, ())
    assert 0 < told.loss < 1

    w.clock.advance(100)
    assert w.router.elsewhere(one, (A, B), frozenset([A])) == B
    told = w.router.sent(msgspec.structs.replace(one, attempt=2), 2, B)
    assert (told.attempt, told.reason, told.tried) == (2, "backup", ((FLEET, 0),))
    assert (told.at_ms, told.waited_ms) == (w.clock.now_ms(), 130)
    assert "xxx" not in str(told), "never the prompt"


def test_an_attempt_that_was_not_decided_says_only_where_it_went() -> None:
    w = World()
    bare = Dispatch(model=MODEL, fleet=FLEET, shard=0, prompt_tokens_estimate=0)
    assert w.router.sent(request(), 1, A) == bare
    w.router.first(request("other"), (A,))
    assert w.router.sent(request(), 1, A) == bare


def test_an_owners_last_word_ends_an_attempt_and_says_what_it_was_worth() -> None:
    w = World()
    board = w.router.policy(MODEL).board
    w.hear(shards=(0,))
    refused: dict[str, Any] = {"request_id": "r", "attempt": 1, "epoch": 0, "code": None, "message": ""}
    ended: dict[str, Any] = {"request_id": "r", "attempt": 1, "epoch": 0, "prompt_tokens": 1, "cached_tokens": 0}
    entries = [
        (Refused(**refused, status=400), 0.0),
        (End(**ended, reason="stop", ends=("stop",), tokens=(5,), completion_tokens=5), 0.0),
        (End(**ended, reason="cancelled", ends=(None,), tokens=(0,), completion_tokens=0), 0.0),
        (Refused(**refused, status=429), 1 - 2**-0.5),
        (End(**ended, reason="error", ends=(None,), tokens=(0,), completion_tokens=0), 1 - 2**-1.5),
        (Refused(**refused, status=500), 1 - 2**-2.5),
    ]
    for entry, risk in entries:
        w.router.sent(request(), 1, A)
        assert board.open_at(A) == 1
        w.router.told_of(request(), entry)
        w.router.told_of(request(), entry)
        assert board.open_at(A) == 0
        assert board.risk(board.rows((A,)), w.clock.now_ms()).tolist() == pytest.approx([risk])


def test_the_log_is_away_by_what_it_left_unacknowledged() -> None:
    clock = ManualClock()
    pulse = Pulse(clock)
    clock.advance(AWAY_MS * 10)
    assert not pulse.log_is_away(), "a pause of ours: nothing was sent either"
    for _ in range(BEATS):
        pulse.sent()
    assert pulse.log_is_away()
    pulse.beat()
    assert not pulse.log_is_away()
    for _ in range(BEATS):
        pulse.sent()
    assert not pulse.log_is_away(), "not yet for long"


class Sending:
    """A sender at work on the in-memory log."""

    def __init__(self, queue_bytes: int = 10_000_000) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog(self.clock)
        self.bus = MemoryBus(self.log, queue_bytes=queue_bytes)
        self.heard: list[BusError | None] = []

    async def __aenter__(self) -> Sending:
        await (await self.bus.admin()).create(all_topics([(FLEET, SHARDS)], [("local", 1)]))
        self.producer = await self.bus.producer()
        self.sender = Sender({"local": self.producer}, Pulse(self.clock), self.clock)
        self.task = asyncio.create_task(self.sender.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait((self.task,))
        await self.sender.flush()
        await self.producer.stop()

    def put(self, message: Any, target: Target = A) -> None:
        self.sender.put(Parcel(target, message, self.heard.append))

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def sent(self, shard: int = 0) -> list[Any]:
        reader = await self.bus.reader()
        await reader.assign({Partition(FleetTopics(FLEET).requests, shard): "earliest"})
        return [decode(record.value) for record in await reader.poll(50)]


async def test_messages_of_a_shard_keep_their_order_and_are_acknowledged() -> None:
    async with Sending() as s:
        for message in (request("a"), cancel("a"), request("b")):
            s.put(message)
        await s.settle()
        assert await s.sent() == [request("a"), cancel("a"), request("b")]
        assert s.heard == [None] * 3


@pytest.mark.parametrize("target", [Target(FLEET, 99), Target(Fleet("mars", "cpu", "m", "1", "s"), 0)])
async def test_what_can_never_be_sent_is_told_at_once_and_holds_nobody_up(target: Target) -> None:
    async with Sending() as s:
        s.put(request("lost"), target)
        s.put(cancel("lost"), target)
        s.put(request("fine"))
        await s.settle()
        assert [type(error) for error in s.heard].count(Unavailable) == 2
        assert await s.sent() == [request("fine")]


async def test_a_cancel_that_finds_no_room_is_tried_again() -> None:
    async with Sending(queue_bytes=600) as s:
        s.log.away()
        s.put(request("a"))
        await s.settle()
        for name in ("b", "c"):
            s.put(request(name))
            s.put(cancel(name))
        await s.settle()
        assert any(isinstance(error, Unavailable) for error in s.heard), "a Request isn't: its client was told"
        s.log.back()
        messages: list[Any] = []
        for _ in range(100):
            messages = await s.sent()
            if [m.request_id for m in messages if isinstance(m, Cancel)] == ["b", "c"]:
                break
        assert [m.request_id for m in messages if isinstance(m, Cancel)] == ["b", "c"]


async def test_an_unknown_outcome_is_told_as_such() -> None:
    async with Sending() as s:
        s.log.hold_acks()
        s.put(request())
        await s.settle()
        await s.producer.stop()
        await s.settle()
        assert [type(error) for error in s.heard] == [SendUnknown]


def test_a_catalogue_mistake_is_not_the_clients() -> None:
    version = ModelVersion(version="1", numerics="sim", pools=("cpu",), regions=("local",))
    wrong = Model(name="m", slug="Not A Slug", owned_by="o", created_ms=0, context_tokens=1, versions=(version,))
    with pytest.raises(ApiError) as caught:
        targets(wrong, version, ("local",))
    assert caught.value.status == 503
