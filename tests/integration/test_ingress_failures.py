"""What a client is told, and what becomes of its request, when something goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from ingress_world import (
    FLEET,
    MODEL,
    SHARDS,
    WORDS,
    Owner,
    World,
    answer,
    chat_body,
    eventually,
    model,
    signal,
    silent,
    world,
)
from test_ingress_http import TEXT, error, events

from ingress.life import Target
from ingress.router import Router
from wire.bus import Partition
from wire.clock import SystemClock
from wire.codec import decode
from wire.messages import Attach, Cancel, Dispatches, ReplyTo, Request, Snapshot
from wire.topics import CATALOGUE, DEAD, SIGNALS, WEIGHTS, FleetTopics, dispatches, replies


async def starts(owner: Owner, request: Request, shard: int) -> None:
    """Accepted and one word, then nothing."""
    await owner.send(request.reply, owner.accepted(request, shard), owner.delta(request, 0, WORDS[:1]))


async def records(w: World, topic: str, partition: int = 0) -> list[Any]:
    reader = await w.bus.reader()
    at = Partition(topic, partition)
    end = (await reader.end_offsets([at]))[at]
    await reader.assign({at: "earliest"})
    out: list[Any] = []
    while reader.position(at) < end:
        out += [decode(record.value) for record in await reader.poll(100)]
    await reader.stop()
    return out


@asynccontextmanager
async def streaming(w: World, **fields: Any) -> AsyncIterator[AsyncIterator[str]]:
    """An open stream's frames."""
    body = chat_body(stream=True, **fields)
    async with w.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200

        async def frames() -> AsyncIterator[str]:
            held = ""
            async for text in response.aiter_text():
                held += text
                *whole, held = held.split("\n\n")
                for frame in whole:
                    yield frame

        yield frames()


async def test_a_client_that_leaves_a_stream_cancels_it() -> None:
    async with world(starts) as w:
        async with streaming(w) as frames:
            assert "Hi" in await anext(frames)
        await w.owner.until(lambda: bool(w.owner.cancels))
        request, _ = w.owner.requests[0]
        cancel = w.owner.cancels[0]
        assert (cancel.request_id, cancel.attempt, cancel.reason) == (request.request_id, 1, "client_gone")
        assert cancel.accept_by_ms == request.accept_by_ms


@pytest.mark.parametrize("script", [silent, starts])
async def test_a_client_that_leaves_a_unary_call_cancels_it_too(script: Any) -> None:
    async with world(script) as w:
        call = asyncio.create_task(w.chat())
        await w.owner.until(lambda: bool(w.owner.requests))
        call.cancel()
        await asyncio.wait((call,))
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert w.owner.cancels[0].reason == "client_gone"


async def test_a_client_that_leaves_before_the_status_line_cancels() -> None:
    async with world(silent) as w:
        call = asyncio.create_task(w.chat(stream=True))
        await w.owner.until(lambda: bool(w.owner.requests))
        call.cancel()
        await asyncio.wait((call,))
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert w.owner.cancels[0].reason == "client_gone"


async def test_all_requests_of_a_call_are_cancelled_with_it() -> None:
    async with world(silent) as w:
        body = {"model": MODEL, "prompt": ["a", "b", "c"]}
        call = asyncio.create_task(w.client.post("/v1/completions", json=body))
        await w.owner.until(lambda: len(w.owner.requests) == 3)
        call.cancel()
        await asyncio.wait((call,))
        await w.owner.until(lambda: len(w.owner.cancels) == 3)


async def test_one_refusal_fails_the_call_and_gives_its_other_requests_up() -> None:
    async def second(owner: Owner, request: Request, shard: int) -> None:
        if request.body.prompt == "b":
            await owner.send(request.reply, owner.refused(request, 400, code="bad", param="prompt"))

    async with world(second) as w:
        response = await w.client.post("/v1/completions", json={"model": MODEL, "prompt": ["a", "b"]})
        assert error(response, 400)["param"] == "prompt"
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert [c.reason for c in w.owner.cancels] == ["gave_up"]


async def test_a_shard_that_stays_silent_is_left_for_another() -> None:
    async def second_try(owner: Owner, request: Request, shard: int) -> None:
        if request.attempt == 2:
            await answer(owner, request, shard)

    async with world(second_try, attempt_timeout_ms=200) as w:
        response = await w.chat()
        assert response.json()["choices"][0]["message"]["content"] == TEXT
        (first, shard1), (second, shard2) = w.owner.requests
        assert first.request_id == second.request_id
        assert {shard1, shard2} == set(range(SHARDS))
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert [(c.attempt, c.reason) for c in w.owner.cancels] == [(1, "moved")]


PATIENT = {"attempt_timeout_ms": 60_000, "accept_timeout_ms": 60_000}
"""the test's own limit is less: only an engine's silence can move a request"""


async def signals(w: World, *ages_ms: int) -> None:
    """A signal of each shard's engine, of that age."""
    for shard, age_ms in enumerate(ages_ms):
        said = signal(SystemClock(), shard)
        await w.put(SIGNALS, MODEL, msgspec.structs.replace(said, engine=f"engine-{shard}", at_ms=said.at_ms - age_ms))


async def only_speaks(w: World, other: int) -> None:
    """This shard's engine is heard now; the others were for the last time 10 s ago."""
    await signals(w, *(0 if shard == other else 10_000 for shard in range(SHARDS)))


async def test_what_a_silent_engine_has_not_accepted_goes_elsewhere_long_before_its_time_is_up() -> None:
    async def frozen(owner: Owner, request: Request, shard: int) -> None:
        if request.attempt == 1:
            await only_speaks(w, 1 - shard)
        else:
            # it thaws, and answers what it was sent
            old = msgspec.structs.replace(request, attempt=1)
            await owner.send(request.reply, owner.accepted(old, 1 - shard), owner.delta(old, 0, ("No",)))
            await answer(owner, request, shard)

    async with world(frozen, **PATIENT) as w:
        response = await w.chat()
        assert response.json()["choices"][0]["message"]["content"] == TEXT
        assert [request.attempt for request, _ in w.owner.requests] == [1, 2]
        assert {shard for _, shard in w.owner.requests} == set(range(SHARDS))
        await w.owner.until(lambda: bool(w.owner.cancels))
        (first, _), (second, _) = w.owner.requests
        assert first.request_id == second.request_id
        assert first.accept_by_ms == second.accept_by_ms
        cancel = w.owner.cancels[0]
        assert (cancel.attempt, cancel.reason, cancel.accept_by_ms) == (1, "moved", first.accept_by_ms)


async def test_what_a_silent_engine_has_accepted_stays_with_its_shard() -> None:
    async def accepts_one_of_two(owner: Owner, request: Request, shard: int) -> None:
        if request.attempt == 2:
            await answer(owner, request, shard)
            owner.epoch += 1  # now the silent engine's shard has another owner
            await answer(owner, *kept[0])
        elif len(owner.requests) > SHARDS:
            at = [[one for one in owner.requests if one[1] == shard] for shard in range(SHARDS)]
            crowded = max(range(SHARDS), key=lambda shard: len(at[shard]))
            kept.append(at[crowded][0])
            left.append(at[crowded][1])
            for other in owner.requests:
                if other not in (*kept, *left):
                    await answer(owner, *other)
            await owner.send(request.reply, owner.accepted(*kept[0]))
            await only_speaks(w, 1 - crowded)

    kept: list[tuple[Request, int]] = []
    left: list[tuple[Request, int]] = []
    async with world(accepts_one_of_two, **PATIENT) as w:
        prompts = ["a", "b", "c"]  # two of them meet at one of two shards
        response = await w.client.post("/v1/completions", json={"model": MODEL, "prompt": prompts})
        assert [choice["text"] for choice in response.json()["choices"]] == [TEXT] * 3
        again = [request.request_id for request, _ in w.owner.requests if request.attempt > 1]
        assert again == [left[0][0].request_id]
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert [(c.request_id, c.attempt, c.reason) for c in w.owner.cancels] == [(again[0], 1, "moved")]


async def test_when_all_engines_are_silent_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[frozenset[Target]] = []
    look = Router.silent

    def watched(router: Router, name: str, candidates: tuple[Target, ...]) -> frozenset[Target]:
        looks.append(look(router, name, candidates))
        return looks[-1]

    monkeypatch.setattr(Router, "silent", watched)
    async with world(silent, **PATIENT) as w:
        await signals(w, *[60_000] * SHARDS)
        call = asyncio.create_task(w.chat())
        await w.owner.until(lambda: bool(w.owner.requests))
        seen = len(looks)

        async def looked() -> bool:
            return len(looks) >= seen + 4

        await eventually(looked)
        assert looks[-4:] == [frozenset()] * 4
        await answer(w.owner, *w.owner.requests[0])
        assert (await call).json()["choices"][0]["message"]["content"] == TEXT
        assert len(w.owner.requests) == 1
        assert w.owner.cancels == []


async def test_a_full_engine_sends_it_elsewhere_and_all_full_is_told() -> None:
    async def full(owner: Owner, request: Request, shard: int) -> None:
        await owner.send(request.reply, owner.refused(request, 429, elsewhere=True, retry_after_s=3))

    async with world(full) as w:
        response = await w.chat()
        assert error(response, 429)["code"] == "overloaded"
        assert response.headers["retry-after"] == "3"
        assert {shard for _, shard in w.owner.requests} == set(range(SHARDS))
        assert not w.owner.cancels, "what was refused needs no Cancel"


@pytest.mark.parametrize("streamed", [True, False])
async def test_nobody_accepting_is_503_and_the_request_is_given_up(streamed: bool) -> None:
    async with world(silent, accept_timeout_ms=300) as w:
        response = await w.chat(stream=streamed)
        assert error(response, 503)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert w.owner.cancels[0].reason == "gave_up"


async def test_headers_go_out_with_a_comment_when_accepting_takes_long() -> None:
    async def late(owner: Owner, request: Request, shard: int) -> None:
        await go.wait()
        await answer(owner, request, shard)

    go = asyncio.Event()
    async with world(late, header_timeout_ms=50) as w, streaming(w) as frames:
        assert await anext(frames) == ": ping"
        go.set()
        rest = [frame async for frame in frames if not frame.startswith(":")]
        assert rest[-1] == "data: [DONE]"
        assert rest[0].startswith("data: {")


async def test_once_headers_are_out_a_failure_is_an_event() -> None:
    async with world(silent, header_timeout_ms=50, accept_timeout_ms=200) as w:
        response = await w.chat(stream=True)
        assert response.status_code == 200
        assert [event["error"]["code"] for event in events(response.text)] == ["overloaded"]


async def test_silence_is_filled_with_comments() -> None:
    async with world(starts, keep_alive_ms=50) as w, streaming(w) as frames:
        await anext(frames)
        assert [await anext(frames) for _ in range(3)] == [": ping"] * 3


async def test_lost_frames_are_asked_for_and_come() -> None:
    async def loses(owner: Owner, request: Request, shard: int) -> None:
        await owner.send(request.reply, owner.accepted(request, shard), owner.delta(request, 0, WORDS[:1]))
        await owner.send(request.reply, owner.delta(request, 3, WORDS[3:4]))

    async def whole(owner: Owner, attach: Attach) -> None:
        request, shard = owner.requests[0]
        everything = owner.delta(request, 0, WORDS, end="stop")
        await owner.send(attach.reply, owner.accepted(request, shard), everything, owner.end(request))

    async with world(loses) as w:
        w.owner.on_attach = whole
        response = await w.chat(stream=True)
        chunks = events(response.text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == TEXT
        attach = w.owner.attaches[0]
        assert attach.reply == w.owner.requests[0][0].reply


async def test_a_takeover_is_only_a_pause() -> None:
    async def taken_over(owner: Owner, request: Request, shard: int) -> None:
        await starts(owner, request, shard)
        zombie = owner.delta(request, 1, (" wrong",))
        owner.epoch = 20
        await owner.send(
            request.reply,
            owner.accepted(request, shard),
            owner.delta(request, 0, WORDS[:2]),
            zombie,
            owner.delta(request, 2, WORDS[2:], end="stop"),
            owner.end(request),
        )

    async with world(taken_over) as w:
        chunks = events((await w.chat(stream=True)).text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == TEXT
        assert not w.owner.attaches


async def test_an_answer_that_would_contradict_itself_ends_in_an_error() -> None:
    async def lies(owner: Owner, request: Request, shard: int) -> None:
        await starts(owner, request, shard)
        await owner.send(request.reply, owner.delta(request, 0, ("Ho", " there"), ids=(1, 2), epoch=20))

    async with world(lies) as w:
        chunks = events((await w.chat(stream=True)).text)
        assert chunks[-1]["error"]["code"] == "inconsistent_answer"
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert w.owner.cancels[0].reason == "gave_up", "not billed"


async def test_frames_for_an_earlier_life_of_the_slot_are_not_heard() -> None:
    async def confused(owner: Owner, request: Request, shard: int) -> None:
        old = ReplyTo(region=request.reply.region, slot=request.reply.slot, incarnation="0" * 20)
        await owner.send(old, owner.accepted(request, shard), owner.delta(request, 0, ("stale",), end="stop"))
        await answer(owner, request, shard)

    async with world(confused) as w:
        assert (await w.chat()).json()["choices"][0]["message"]["content"] == TEXT


async def test_what_cannot_be_decoded_is_noted_and_skipped() -> None:
    async def garbage(owner: Owner, request: Request, shard: int) -> None:
        for value in (b"\x00", b"{}", b'{"t":"Frames","v":1}', b'{"t":"Frames","v":99}'):
            await owner._out.send(replies("local"), value, partition=0)
        await answer(owner, request, shard)

    async with world(garbage) as w:
        assert (await w.chat()).status_code == 200
        noted = await records(w, DEAD)
        assert [(note.topic, note.offset) for note in noted] == [(replies("local"), i) for i in range(4)]


async def test_a_slow_reader_is_cancelled_not_waited_for() -> None:
    async def floods(owner: Owner, request: Request, shard: int) -> None:
        await owner.send(request.reply, owner.accepted(request, shard))
        for first in range(200):
            await owner.send(request.reply, owner.delta(request, first, ("x" * 100_000,)))

    async with world(floods, stream_buffer_bytes=200_000) as w:
        async with w.connection(limit=1024) as (reader, writer):
            writer.write(w.post("/v1/chat/completions", chat_body(stream=True)))
            assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
            await w.owner.until(lambda: bool(w.owner.cancels))
            assert w.owner.cancels[0].reason == "client_gone"
        assert "millstream_ingress_slow_readers_total 1.0" in (await w.client.get("/metrics")).text


async def test_a_log_that_goes_away_is_503_and_nothing_runs_after_it() -> None:
    async with world(silent, accept_timeout_ms=5_000) as w:
        w.log.away()
        response = await w.chat()
        assert error(response, 503)["code"] == "service_unavailable"
        assert int(response.headers["retry-after"]) >= 1
        assert (await w.client.get("/readyz")).status_code == 503
        again = await w.chat()
        assert error(again, 503)
        w.log.back()
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert len(w.owner.requests) == 1, "the second was refused at once, without a Request"
        assert [c.reason for c in w.owner.cancels] == ["gave_up"]
        order = [type(m) for shard in range(SHARDS) for m in await records(w, FleetTopics(FLEET).requests, shard)]
        assert order == [Request, Cancel]

        async def is_ready() -> bool:
            return (await w.client.get("/readyz")).status_code == 200

        await eventually(is_ready)


async def test_a_queue_that_is_full_is_503_at_once() -> None:
    async with world(silent) as w:
        for producer in w.ingress._producers:
            producer._queue_bytes = 1  # type: ignore[attr-defined]
        w.log.away()
        assert error(await w.chat(), 503)


async def test_keys_that_cannot_be_checked_for_too_long_are_503() -> None:
    async with world(credentials_max_age_ms=3_000) as w:
        w.log.away()

        async def refused() -> bool:
            return (await w.client.get("/v1/models")).status_code == 503

        await eventually(refused)
        missing = (await w.client.get("/readyz")).json()["missing"]
        assert any("credentials" in reason for reason in missing)
        w.log.back()

        async def good() -> bool:
            return (await w.client.get("/v1/models")).status_code == 200

        await eventually(good)


async def test_open_streams_end_and_new_calls_are_sent_away_while_draining() -> None:
    async def held(owner: Owner, request: Request, shard: int) -> None:
        await starts(owner, request, shard)
        await go.wait()
        await owner.send(request.reply, owner.delta(request, 1, WORDS[1:], end="stop"), owner.end(request))

    go = asyncio.Event()
    async with world(held) as w, streaming(w) as frames:
        await anext(frames)
        draining = asyncio.create_task(w.ingress.drain(10))
        await asyncio.sleep(0)
        ready = await w.client.get("/readyz")
        assert ready.status_code == 503
        assert ready.headers["connection"] == "close"
        assert (await w.client.get("/health")).status_code == 200
        response = await w.chat()
        assert error(response, 503)
        assert response.headers["connection"] == "close"
        go.set()
        assert [frame async for frame in frames][-1] == "data: [DONE]"
        await draining


async def test_streams_that_outlast_the_drain_are_told_and_given_up() -> None:
    async with world(starts) as w, streaming(w) as frames:
        await anext(frames)
        await w.ingress.drain(0)
        rest = [frame async for frame in frames]
        assert "shutting down" in rest[-1]
        await w.owner.until(lambda: bool(w.owner.cancels))
        assert w.owner.cancels[0].reason == "gave_up"


async def test_a_life_is_proved_each_second_and_demand_told() -> None:
    async with world() as w:
        await w.chat()

        async def told() -> bool:
            signals = [s for s in await records(w, SIGNALS) if type(s).__name__ == "DemandSignal"]
            return any(s.model == MODEL and s.requests_per_s and s.tokens_per_s for s in signals)

        await eventually(told)
        signals = [s for s in await records(w, SIGNALS) if type(s).__name__ == "DemandSignal"]
        assert signals[0].model == "", "alive from the first moment"
        assert len({s.incarnation for s in signals}) == 1
        assert any(s.accept.total == 1 for s in signals)


async def test_refused_requests_are_demand_and_are_told_apart() -> None:
    async with world() as w:
        await w.chat()
        now_ms = SystemClock().now_ms()
        shedding = Snapshot(
            model=MODEL, region="local", version=1, created_ms=now_ms, routes=(), shed={"0": 1.0}, why="full"
        )
        await w.put(WEIGHTS, f"local/{MODEL}", shedding)

        async def refuses() -> bool:
            return (await w.chat()).status_code == 503

        await eventually(refuses)
        await asyncio.sleep(1.1)  # what was sent before is told in a signal of its own
        sent = len(w.owner.requests)
        assert [(await w.chat()).status_code for _ in range(3)] == [503] * 3
        assert len(w.owner.requests) == sent

        async def told() -> bool:
            signals = [s for s in await records(w, SIGNALS) if type(s).__name__ == "DemandSignal" and s.model == MODEL]
            return any(
                0 < s.requests_per_s == s.refused_per_s
                and s.priorities == {"0": s.requests_per_s}
                and s.prompt_tokens_per_s == 0
                for s in signals
            )

        await eventually(told)


async def test_what_was_sent_is_told_to_the_siblings() -> None:
    async with world() as w:
        await w.chat()

        async def told() -> bool:
            return bool(await records(w, dispatches("local")))

        await eventually(told)
        message: Dispatches = (await records(w, dispatches("local")))[0]
        assert [(d.fleet, d.shard) for d in message.sent] == [(FLEET, w.owner.requests[0][1])]


async def test_a_model_whose_topics_do_not_exist_is_503() -> None:
    async with world() as w:
        await w.put(CATALOGUE, "ghost", model("ghost", slug="ghost"))

        async def known() -> bool:
            return (await w.client.get("/v1/models/ghost")).status_code == 200

        await eventually(known)
        assert error(await w.chat(model="ghost"), 503)


async def test_too_many_open_calls_are_503() -> None:
    async with world(silent, max_open_streams=1) as w:
        first = asyncio.create_task(w.chat())
        await w.owner.until(lambda: bool(w.owner.requests))
        assert error(await w.chat(), 503)["code"] == "overloaded"
        first.cancel()
        await asyncio.wait((first,))
