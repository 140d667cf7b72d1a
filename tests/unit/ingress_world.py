"""An ingress on the in-memory bus, served over real HTTP, with a scripted owner in place of the workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from ingress.credentials import hmac_secret, key_hmac
from ingress.server import HttpServer
from ingress.service import Ingress, build
from millstream.ports import free_port
from wire.bus import Bus, Partition
from wire.clock import SystemClock
from wire.codec import decode, encode
from wire.fleet import Fleet
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog
from wire.messages import (
    Accepted,
    Attach,
    Cancel,
    Credential,
    Delta,
    End,
    EngineSignal,
    Entry,
    Frames,
    Limits,
    Model,
    ModelVersion,
    Refused,
    ReplyTo,
    Request,
    TokenLogprob,
)
from wire.settings import Settings
from wire.topics import CATALOGUE, CREDENTIALS, SIGNALS, FleetTopics, all_topics, replies

SECRET = "0123456789abcdef" * 2
KEY = "sk-ms-dev-0123456789"
MODEL = "org/tiny-model"
FLEET = Fleet("local", "cpu", "org-tiny-model", "1", "sim")
SHARDS = 2
WORDS = ("Hi", " there", ",", " friend", "!")


def credential(key: str = KEY, *, revoked_ms: int | None = None, limits: Limits | None = None) -> Credential:
    key_id = key.split("-")[2]
    return Credential(
        key_id=key_id,
        hmac=key_hmac(hmac_secret(SECRET), key),
        tenant="acme",
        project="p1",
        name=key_id,
        created_ms=1,
        revoked_ms=revoked_ms,
        limits=limits or Limits(),
    )


def model(name: str = MODEL, **fields: Any) -> Model:
    version = ModelVersion(version="1", numerics="sim", pools=("cpu",), regions=("local",), shards=SHARDS)
    known: dict[str, Any] = {
        "name": name,
        "slug": "org-tiny-model",
        "owned_by": "org",
        "created_ms": 1_700_000_000_000,
        "context_tokens": 2048,
        "versions": (version,),
    }
    return Model(**{**known, **fields})


Script = Callable[["Owner", Request, int], Awaitable[None]]


@dataclass
class Owner:
    """Owns every shard of the fleet and does with each Request what its script says."""

    bus: Bus
    script: Script
    requests: list[tuple[Request, int]] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    attaches: list[Attach] = field(default_factory=list)
    seen: asyncio.Event = field(default_factory=asyncio.Event)
    on_attach: Callable[[Owner, Attach], Awaitable[None]] | None = None
    on_cancel: Callable[[Owner, Cancel], Awaitable[None]] | None = None
    epoch: int = 7
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._out = await self.bus.producer()
        self._reader = await self.bus.reader()
        topic = FleetTopics(FLEET).requests
        await self._reader.assign({Partition(topic, shard): "latest" for shard in range(SHARDS)})

    async def run(self) -> None:
        try:
            while True:
                for record in await self._reader.poll(200):
                    self._take(decode(record.value), record.partition)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._reader.stop()
            await self._out.stop()

    def _take(self, message: Any, shard: int) -> None:
        match message:
            case Request():
                self.requests.append((message, shard))
                self._spawn(self.script(self, message, shard))
            case Cancel():
                self.cancels.append(message)
                if self.on_cancel is not None:
                    self._spawn(self.on_cancel(self, message))
            case Attach():
                self.attaches.append(message)
                if self.on_attach is not None:
                    self._spawn(self.on_attach(self, message))
        self.seen.set()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what this owner sees."""
        while not condition():
            self.seen.clear()
            await self.seen.wait()

    async def send(self, reply: ReplyTo, *entries: Entry) -> None:
        frames = Frames(slot=reply.slot, incarnation=reply.incarnation, entries=entries)
        await self._out.send(replies(reply.region), encode(frames), partition=reply.slot)

    def accepted(self, request: Request, shard: int, *, epoch: int | None = None) -> Accepted:
        return Accepted(
            request_id=request.request_id,
            attempt=request.attempt,
            epoch=self.epoch if epoch is None else epoch,
            fleet=FLEET,
            shard=shard,
            ref=2,  # type: ignore[arg-type]
            prompt_tokens=11,
            cached_tokens=4,
            fingerprint="fp_sim",
        )

    def delta(self, request: Request, first: int, words: tuple[str, ...], **fields: Any) -> Delta:
        known: dict[str, Any] = {
            "request_id": request.request_id,
            "attempt": request.attempt,
            "epoch": self.epoch,
            "choice": 0,
            "first": first,
            "ids": tuple(range(100 + first, 100 + first + len(words))),
            "text": "".join(words),
        }
        if request.body.logprobs is not None:
            known["logprobs"] = tuple(logprob(word, request.body.logprobs) for word in words)
        return Delta(**{**known, **fields})

    def end(self, request: Request, tokens: int = len(WORDS), **fields: Any) -> End:
        n = request.body.n
        known: dict[str, Any] = {
            "request_id": request.request_id,
            "attempt": request.attempt,
            "epoch": self.epoch,
            "reason": "stop",
            "ends": ("stop",) * n,
            "tokens": (tokens,) * n,
            "prompt_tokens": 11,
            "cached_tokens": 4,
            "completion_tokens": tokens * n,
        }
        return End(**{**known, **fields})

    def refused(self, request: Request, status: int = 503, **fields: Any) -> Refused:
        known: dict[str, Any] = {
            "request_id": request.request_id,
            "attempt": request.attempt,
            "epoch": self.epoch,
            "status": status,
            "code": "overloaded",
            "message": "Full.",
        }
        return Refused(**{**known, **fields})


def logprob(word: str, top: int) -> TokenLogprob:
    tops = tuple(TokenLogprob(token=f"{word}{i}", bytes=(65, i), logprob=-float(i)) for i in range(top))
    return TokenLogprob(token=word, bytes=tuple(word.encode()), logprob=-0.5, top=tops)


async def answer(owner: Owner, request: Request, shard: int) -> None:
    """The whole answer, word by word."""
    limit = request.body.max_tokens or len(WORDS)
    words = WORDS[:limit]
    cut = "stop" if request.body.max_tokens is None else "length"
    await owner.send(request.reply, owner.accepted(request, shard))
    for first, word in enumerate(words):
        last = cut if first == len(words) - 1 else None
        await owner.send(
            request.reply,
            *(owner.delta(request, first, (word,), choice=k, end=last) for k in range(request.body.n)),
        )
    await owner.send(request.reply, owner.end(request, len(words), reason=cut, ends=(cut,) * request.body.n))


async def silent(owner: Owner, request: Request, shard: int) -> None:
    """Nothing."""


@dataclass
class World:
    """What a test has in its hands."""

    log: MemoryLog
    """the in-memory bus's, whether or not it is used"""
    bus: Bus
    owner: Owner
    ingress: Ingress
    client: httpx.AsyncClient
    port: int

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=chat_body(**fields))

    async def put(self, topic: str, key: str, message: Any) -> None:
        """Write a compacted record."""
        producer = await self.bus.producer()
        value = None if message is None else encode(message)
        await (await producer.send(topic, value, key=key.encode(), partition=0))
        await producer.stop()

    @asynccontextmanager
    async def connection(self, limit: int = 2**16) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection of one's own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def raw(self, data: bytes) -> bytes:
        """Send bytes on a connection of their own, read until the server closes."""
        async with self.connection() as (reader, writer):
            writer.write(data)
            return await reader.read()

    def post(self, path: str, body: Any, *headers: str) -> bytes:
        """A request as bytes, with a good key. A body of bytes is sent as it is."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: x",
            f"Authorization: Bearer {KEY}",
            "Content-Type: application/json",
            f"Content-Length: {len(raw)}",
            *headers,
        ]
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode() + raw


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it holds; fails if it doesn't for long."""
    for _ in range(3_000):
        if await condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to be")


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Say hi."}], **fields}


def signal(clock: SystemClock, shard: int = 0) -> EngineSignal:
    return EngineSignal(
        engine="engine-0",
        incarnation="a",
        fleet=FLEET,
        shards=(shard,),
        state="ready",
        model=MODEL,
        fingerprint="fp_sim",
        at_ms=clock.now_ms(),
        queued_requests=0,
        queued_tokens=0,
        running=0,
        slots=8,
    )


@asynccontextmanager
async def world(script: Script = answer, bus: Bus | None = None, **settings: Any) -> AsyncIterator[World]:
    """A running ingress, ready, with one model, one key and one engine."""
    clock = SystemClock()
    log = MemoryLog(clock)
    bus = bus or MemoryBus(log)
    admin = await bus.admin()
    await admin.create(all_topics([(FLEET, SHARDS)], [("local", 2)]))
    await admin.stop()
    owner = Owner(bus, script)
    await owner.start()
    owning = asyncio.create_task(owner.run())
    port = free_port()
    known = {"port": port, "slots": 2, "key_secret": SECRET}
    ingress = await build(Settings(**{**known, **settings}), {"local": bus}, clock)
    server = HttpServer(ingress.app, "127.0.0.1", port, 1000)
    client = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=20, trust_env=False
    )
    made = World(log, bus, owner, ingress, client, port)
    await made.put(CREDENTIALS, "dev", credential())
    await made.put(CATALOGUE, MODEL, model())
    await ingress.open()
    try:
        await server.start()
        await _ready(made, clock)
        yield made
    finally:
        await client.aclose()
        log.back()
        await ingress.drain(0)
        await server.stop(2)
        await ingress.close()
        owning.cancel()
        await asyncio.wait((owning,))


async def _ready(made: World, clock: SystemClock) -> None:
    async def signalled() -> bool:
        await made.put(SIGNALS, MODEL, signal(clock))
        return not made.ingress.missing()

    await eventually(signalled)
    assert (await made.client.get("/readyz")).status_code == 200
