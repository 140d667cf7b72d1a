"""The same ingress on a real broker: it answers, outlives the broker's death, and nothing runs that was refused."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from ingress_world import Owner, chat_body, eventually, silent, world
from kafka_broker import RunningBroker
from test_ingress_http import TEXT, error, events

from wire.clock import SystemClock
from wire.kafka import KafkaBus
from wire.messages import Request

pytestmark = pytest.mark.kafka


@pytest.fixture
def mortal_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """A broker of one's own, to be killed."""
    running = RunningBroker(tmp_path_factory.mktemp("mortal"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


async def test_answers_come_through_the_real_log(kafka_bus: KafkaBus) -> None:
    async with world(bus=kafka_bus) as w:
        assert (await w.chat()).json()["choices"][0]["message"]["content"] == TEXT
        chunks = events((await w.chat(stream=True)).text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == TEXT


async def test_a_broker_that_dies_is_503_and_its_return_needs_no_restart(mortal_broker: RunningBroker) -> None:
    async with world(silent, bus=KafkaBus(mortal_broker.cluster, SystemClock())) as w:
        mortal_broker.signal(signal.SIGKILL)
        response = await w.client.post("/v1/chat/completions", json=chat_body(), timeout=15)
        assert error(response, 503)
        assert response.headers["retry-after"]
        refused = {response.headers["x-request-id"].removeprefix("req_")}
        w.owner.script = echo
        mortal_broker.start()

        async def served() -> bool:
            again = await w.client.post("/v1/chat/completions", json=chat_body(), timeout=30)
            if again.status_code != 200:
                refused.add(again.headers["x-request-id"].removeprefix("req_"))
            return again.status_code == 200

        await eventually(served)
        ran = {request.request_id for request, _ in w.owner.requests} & refused
        await w.owner.until(lambda: ran <= {cancel.request_id for cancel in w.owner.cancels})
        assert {c.reason for c in w.owner.cancels if c.request_id in ran} <= {"gave_up"}


async def echo(owner: Owner, request: Request, shard: int) -> None:
    """One word."""
    done = owner.delta(request, 0, ("Hi",), end="stop")
    await owner.send(request.reply, owner.accepted(request, shard), done, owner.end(request, 1))
