"""Readers in the background, over both buses."""

from __future__ import annotations

import asyncio

import pytest
from bus_world import World, until

from wire.bus import Record
from wire.codec import encode
from wire.follow import Follower, Tail
from wire.messages import Claim, Placement


def placement(engine: str, model: str) -> Placement:
    return Placement(engine=engine, model=model, version="1", pool="cpu", wanted="running")


class Dead:
    """Collects what could not be decoded."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []

    async def __call__(self, record: Record, why: str) -> None:
        self.seen.append((record.offset, why))


async def test_a_follower_holds_the_latest_message_of_every_key(world: World) -> None:
    topic = await world.topic("placement", retention_ms=None, partitions=2)
    producer, dead = await world.producer(), Dead()
    changes: list[tuple[str, str | None]] = []
    follower: Follower[Placement] = Follower(
        world.bus(),
        topic,
        Placement,
        clock=world.clock,
        dead=dead,
        on_change=lambda key, message: changes.append((key, message.model if message else None)),
    )
    for key, value in (("a", placement("a", "x")), ("b", placement("b", "y")), ("a", placement("a", "z"))):
        await (await producer.send(topic, encode(value), key=key.encode()))
    assert not follower.caught_up
    assert follower.age_ms == float("inf")
    await follower.start()
    await follower.start()
    await asyncio.wait_for(follower.wait_caught_up(), 30)
    assert dict(follower.items) == {"a": placement("a", "z"), "b": placement("b", "y")}
    assert follower.age_ms == 0
    await producer.send(topic, None, key=b"a")
    await producer.send(topic, None, key=b"never there")
    await producer.send(topic, b"{}", key=b"b")
    await producer.send(topic, encode(placement("b", "y2")), key=b"\xff")
    await producer.send(topic, encode(placement("c", "new")), key=b"c")
    await until(lambda: "c" in follower.items and "a" not in follower.items and len(dead.seen) == 2)
    assert set(follower.items) == {"b", "c"}, "what can't be decoded changes nothing"
    assert {why for _, why in dead.seen} == {"the format's version isn't 1", "the key isn't UTF-8"}
    assert [model for key, model in changes if key == "a"] == ["z", None], "of what came together the last one counts"
    await follower.stop()
    await follower.stop()
    assert set(follower.items) == {"b", "c"}


async def test_a_follower_knows_how_old_its_knowledge_is(world: World) -> None:
    topic = await world.topic("placement", retention_ms=None)
    producer = await world.producer()
    follower: Follower[Placement] = Follower(world.bus(), topic, Placement, clock=world.clock, dead=Dead())
    await follower.start()
    await asyncio.wait_for(follower.wait_caught_up(), 30)
    world.clock.advance(700)
    assert follower.age_ms == 700, "it isn't asked again before a second has passed"
    world.clock.advance(300)
    await until(lambda: follower.age_ms == 0)
    await (await producer.send(topic, encode(placement("a", "x")), key=b"a"))
    await until(lambda: "a" in follower.items)
    await follower.stop()
    world.clock.advance(5_000)
    assert follower.age_ms >= 5_000


async def test_a_follower_may_start_before_its_topic_exists(world: World) -> None:
    follower: Follower[Placement] = Follower(world.bus(), world.name("late"), Placement, clock=world.clock, dead=Dead())
    await follower.start()
    await asyncio.sleep(0.1)
    assert not follower.caught_up
    await world.topic("late", retention_ms=None)
    await asyncio.wait_for(follower.wait_caught_up(), 30)
    await follower.stop()


async def test_a_tail_calls_with_each_new_message_and_survives_its_handler(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    topic = await world.topic("signals")
    producer, dead = await world.producer(acks="leader"), Dead()
    seen: list[tuple[str, int]] = []

    def handle(message: Placement, record: Record) -> None:
        if message.engine == "bad":
            raise RuntimeError("a fault of the handler")
        seen.append((message.engine, record.offset))

    await (await producer.send(topic, encode(placement("old", "x"))))
    tail: Tail[Placement] = Tail(world.bus(), topic, Placement, handle, dead=dead)
    await tail.start()
    await asyncio.wait_for(tail.wait_reading(), 30)
    claim = Claim(engine="e", incarnation="i", nonce="n", fingerprint="f", at_ms=1)
    for value in (
        encode(placement("a", "x")),
        b"nonsense",
        encode(claim),
        encode(placement("bad", "x")),
        encode(placement("b", "x")),
    ):
        await producer.send(topic, value)
    await until(lambda: len(seen) == 2)
    assert seen == [("a", 1), ("b", 5)]
    assert dead.seen == [(2, "the value isn't JSON"), (3, "a Claim has no place here")]
    assert "offset 4 was read, but could not be handled" in caplog.text
    await tail.stop()
