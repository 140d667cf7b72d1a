"""The HTTP surface, over real HTTP: granian in front, the in-memory bus and a scripted owner behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from ingress_world import (
    KEY,
    MODEL,
    WORDS,
    Owner,
    World,
    answer,
    chat_body,
    credential,
    eventually,
    model,
    silent,
    world,
)

from wire.messages import Delta, Limits, Request
from wire.topics import CATALOGUE, CREDENTIALS

TEXT = "".join(WORDS)


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    return dict(body)


def events(text: str) -> list[Any]:
    """Data of a finished stream, split the strict way; comments are left out."""
    assert "\r" not in text
    frames = text.split("\n\n")
    assert frames.pop() == ""
    data = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def openai_client(w: World) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{w.client.base_url}/v1", api_key=KEY, max_retries=0)


async def holds(call: Awaitable[httpx.Response], condition: Callable[[httpx.Response], bool]) -> bool:
    return condition(await call)


async def stream(w: World, **fields: Any) -> list[Any]:
    response = await w.chat(stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_a_unary_chat_is_the_owners_words() -> None:
    async with world() as w:
        response = await w.chat()
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "chat.completion"
        assert body["model"] == MODEL
        assert body["system_fingerprint"] == "fp_sim"
        assert body["service_tier"] == "default"
        assert body["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (11, 5, 16)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4
        request, _ = w.owner.requests[0]
        assert response.headers["x-request-id"] == f"req_{request.request_id}"
        assert body["id"] == f"chatcmpl-{request.request_id}"


async def test_what_the_owner_gets_says_who_asked_and_how_long_it_may_take() -> None:
    async with world(accept_timeout_ms=7_000, request_timeout_ms=60_000) as w:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await w.client.post("/v1/chat/completions", json=chat_body(stream=False), headers={"traceparent": trace})
        request, _ = w.owner.requests[0]
        assert (request.tenant, request.project, request.key_id) == ("acme", "p1", "dev")
        assert (request.model, request.version, request.attempt) == (MODEL, "1", 1)
        assert request.accept_by_ms - request.created_ms == 7_000
        assert request.deadline_ms - request.created_ms == 60_000
        assert request.traceparent == trace
        assert (request.reply.region, request.reply.slot) == ("local", 0)


@pytest.mark.parametrize(
    ("wished", "tier", "priority"), [("flex", "flex", -1), ("auto", "default", 0), (None, "default", 0)]
)
async def test_a_tier_is_a_priority_and_is_told(wished: str | None, tier: str, priority: int) -> None:
    async with world() as w:
        assert (await w.chat(service_tier=wished)).json()["service_tier"] == tier
        chunks = await stream(w, service_tier=wished)
        assert {chunk["service_tier"] for chunk in chunks[:-1]} == {tier}
        assert {(request.tier, request.priority) for request, _ in w.owner.requests} == {(tier, priority)}


async def test_a_stream_is_chunks_that_join_to_the_words() -> None:
    async with world() as w:
        chunks = await stream(w)
        assert chunks.pop() == "[DONE]"
        assert len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks}) == 1
        assert all(len(c["choices"]) == 1 and "usage" not in c for c in chunks)
        deltas = [c["choices"][0]["delta"] for c in chunks]
        assert [d.get("role") for d in deltas] == ["assistant"] + [None] * 5
        assert "".join(d.get("content", "") for d in deltas) == TEXT
        assert deltas[-1] == {}
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 5 + ["stop"]


async def test_usage_comes_once_and_only_when_asked() -> None:
    async with world() as w:
        chunks = await stream(w, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert chunks.pop() == "[DONE]"
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 16
        assert all(c["usage"] is None for c in chunks)


async def test_choices_are_told_apart() -> None:
    async with world() as w:
        chunks = (await stream(w, n=2))[:-1]
        for k in range(2):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == k]
            assert "".join(c["delta"].get("content", "") for c in mine) == TEXT
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        body = (await w.chat(n=2)).json()
        assert [c["message"]["content"] for c in body["choices"]] == [TEXT, TEXT]
        assert body["usage"]["completion_tokens"] == 10


async def test_logprobs_come_as_asked() -> None:
    async with world() as w:
        body = (await w.chat(logprobs=True, top_logprobs=2)).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert [one["token"] for one in content] == list(WORDS)
        assert [len(one["top_logprobs"]) for one in content] == [2] * 5
        chunks = (await stream(w, logprobs=True))[:-1]
        streamed = [c["choices"][0]["logprobs"] for c in chunks]
        assert [one["content"][0]["token"] for one in streamed[:-1]] == list(WORDS)
        assert streamed[-1] is None


async def test_an_answer_without_a_word_still_has_a_role() -> None:
    async def nothing(owner: Owner, request: Request, shard: int) -> None:
        done = owner.delta(request, 0, (), end="stop")
        await owner.send(request.reply, owner.accepted(request, shard), done, owner.end(request, 0))

    async with world(nothing) as w:
        chunks = await stream(w)
        assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [{"role": "assistant", "content": ""}, {}]
        assert (await w.chat()).json()["choices"][0]["message"]["content"] == ""


async def test_text_that_is_held_back_makes_no_empty_chunk() -> None:
    async def held(owner: Owner, request: Request, shard: int) -> None:
        await owner.send(
            request.reply,
            owner.accepted(request, shard),
            owner.delta(request, 0, ("",), ids=(1, 2)),
            owner.delta(request, 2, ("日本",), ids=(3,), end="length"),
            owner.end(request, 3, reason="length", ends=("length",)),
        )

    async with world(held) as w:
        chunks = await stream(w)
        assert [c["choices"][0]["delta"].get("content") for c in chunks[:-1]] == ["日本", None]


async def test_completions_of_several_prompts_are_a_request_each() -> None:
    async with world() as w:
        body = {"model": MODEL, "prompt": ["a b", "c d"], "n": 2, "max_tokens": 2, "echo": True}
        whole = (await w.client.post("/v1/completions", json=body)).json()
        assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
        assert [c["text"] for c in whole["choices"]] == ["a bHi there"] * 2 + ["c dHi there"] * 2
        assert [c["finish_reason"] for c in whole["choices"]] == ["length"] * 4
        assert whole["usage"]["prompt_tokens"] == 22, "each prompt once, whatever n"
        assert whole["usage"]["completion_tokens"] == 8
        assert len({r.request_id for r, _ in w.owner.requests}) == 2
        assert len({r.body.sampling.seed for r, _ in w.owner.requests}) == 2, "two draws, not one answer twice"
        streamed = await w.client.post("/v1/completions", json={**body, "stream": True})
        chunks = events(streamed.text)
        assert chunks.pop() == "[DONE]"
        texts = [""] * 4
        for chunk in chunks:
            assert chunk["object"] == "text_completion"
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["a bHi there"] * 2 + ["c dHi there"] * 2


async def test_legacy_logprobs_say_where_each_token_stands() -> None:
    async with world() as w:
        body = {"model": MODEL, "prompt": "x", "logprobs": 1}
        logprobs = (await w.client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == list(WORDS)
        assert logprobs["text_offset"] == [0, 2, 8, 9, 16]
        assert logprobs["top_logprobs"][0] == {"Hi0": 0.0, "Hi": -0.5}
        streamed = await w.client.post("/v1/completions", json={**body, "stream": True})
        chunks = [c["choices"][0]["logprobs"] for c in events(streamed.text)[:-1]]
        assert [one["text_offset"][0] for one in chunks if one] == [0, 2, 8, 9, 16]


async def test_models_are_listed_and_found_by_names_with_slashes() -> None:
    async with world() as w:
        listed = (await w.client.get("/v1/models")).json()
        assert (listed["object"], [m["id"] for m in listed["data"]]) == ("list", [MODEL])
        assert (await w.client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
        for name in ("nope", "a/../b", "%2e%2e/x", "", "%ff", "x" * 3_000):
            assert error(await w.client.get(f"/v1/models/{name}"), 404)["code"] == "model_not_found"
        assert error(await w.chat(model="/../" + MODEL), 404)["code"] == "model_not_found"
        await w.put(CATALOGUE, MODEL, None)
        await eventually(lambda: holds(w.client.get("/v1/models"), lambda r: not r.json()["data"]))


async def test_keys_are_checked_and_revocation_needs_no_restart() -> None:
    async with world() as w:
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": f"Basic {KEY}"}):
            async with httpx.AsyncClient(base_url=w.client.base_url, trust_env=False) as other:
                for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/x"), ("POST", "/v1/chat/completions")):
                    response = await other.request(method, path, headers=headers)
                    assert error(response, 401)["code"] == "invalid_api_key"
                    assert response.headers["x-should-retry"] == "false"
        await w.put(CREDENTIALS, "dev", credential(revoked_ms=1))
        await eventually(lambda: holds(w.client.get("/v1/models"), lambda r: r.status_code == 401))
        assert not w.owner.requests


async def test_limits_of_a_key_are_429_with_a_time_to_wait() -> None:
    async with world(silent) as w:
        await w.put(CREDENTIALS, "dev", credential(limits=Limits(concurrent=1, models=("other",))))
        await eventually(lambda: holds(w.client.get("/v1/models"), lambda r: not r.json()["data"]))
        await w.put(CREDENTIALS, "dev", credential(limits=Limits(concurrent=1)))
        await eventually(lambda: holds(w.client.get("/v1/models"), lambda r: bool(r.json()["data"])))
        waiting = asyncio.create_task(w.chat())
        await w.owner.until(lambda: bool(w.owner.requests))
        response = await w.chat()
        assert error(response, 429)["code"] == "concurrency_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        waiting.cancel()
        await asyncio.wait((waiting,))
        await w.owner.until(lambda: bool(w.owner.cancels))


async def test_a_models_own_n_is_the_limit() -> None:
    async with world() as w:
        await w.put(CATALOGUE, MODEL, model(max_n=2))
        await eventually(lambda: holds(w.chat(n=3), lambda r: r.status_code == 400))
        assert error(await w.chat(n=3), 400)["param"] == "n"


async def test_what_is_not_there_has_an_envelope_too() -> None:
    async with world() as w:
        assert error(await w.client.get("/nope"), 404)["code"] == "unknown_url"
        assert error(await w.client.post("/v1/responses", json={}), 404)["code"] == "unknown_url"
        assert error(await w.client.delete("/v1/chat/completions"), 405)["code"] == "method_not_allowed"
        assert error(await w.client.get("/v1/chat/completions/"), 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/chat/completions", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/models/a/b", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_answered_with_those_it_does(
    method: str, path: str, allowed: str
) -> None:
    async with world() as w:
        answer = await w.client.request(method, path)
        assert error(answer, 405)["code"] == "method_not_allowed"
        assert answer.headers["allow"] == allowed
        assert "allow" not in (await w.client.get("/nope")).headers


async def test_health_needs_no_key_and_preflight_neither() -> None:
    async with world() as w, httpx.AsyncClient(base_url=w.client.base_url, trust_env=False) as other:
        assert (await other.get("/health")).status_code == 200
        assert (await other.head("/health")).status_code == 200
        wanted = "authorization,content-type,x-stainless-os"
        response = await other.options(
            "/v1/chat/completions",
            headers={
                "Origin": "http://localhost:5174",
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": wanted,
            },
        )
        assert response.status_code == 204
        assert response.headers["access-control-allow-headers"] == wanted
        assert response.headers["access-control-allow-origin"] == "*"
        refused = await other.get("/v1/models", headers={"Origin": "http://localhost:5174"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "*", "or a browser can't read the error"


async def test_metrics_count_what_was_answered_and_name_no_prompt() -> None:
    async with world() as w:
        await w.chat(messages=[{"role": "user", "content": "SECRETWORD"}])
        await w.chat(temperature=9)
        text = (await w.client.get("/metrics")).text
        assert 'millstream_ingress_answers_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'millstream_ingress_answers_total{route="/v1/chat/completions",status="400"} 1.0' in text
        assert f'millstream_ingress_tokens_total{{model="{MODEL}"}} 5.0' in text
        assert "millstream_ingress_open_calls 0.0" in text
        assert "SECRETWORD" not in text


async def test_a_bad_stream_request_is_plain_json_before_any_event() -> None:
    async def too_long(owner: Owner, request: Request, shard: int) -> None:
        refused = owner.refused(
            request, 400, code="context_length_exceeded", param="messages", message="Too long: use fewer tokens."
        )
        await owner.send(request.reply, refused)

    async with world(too_long) as w:
        assert error(await w.chat(stream=True, temperature=9), 400)["param"] == "temperature"
        for streamed in (True, False):
            body = error(await w.chat(stream=streamed), 400)
            assert (body["code"], body["param"]) == ("context_length_exceeded", "messages")


async def test_a_stream_that_fails_says_so_and_is_not_done() -> None:
    async def breaks(owner: Owner, request: Request, shard: int) -> None:
        await owner.send(request.reply, owner.accepted(request, shard), owner.delta(request, 0, ("Hi",)))
        failed = owner.end(request, 1, reason="error", ends=(None,), error="secret detail")
        await owner.send(request.reply, failed)

    async with world(breaks) as w:
        chunks = await stream(w)
        assert chunks[-1]["error"]["code"] == "engine_error"
        assert "[DONE]" not in chunks
        assert "secret detail" not in json.dumps(chunks)
        assert error(await w.chat(), 500)["code"] == "engine_error"
        async with openai_client(w) as client:
            with pytest.raises(openai.APIError, match="engine failed"):
                async for _ in await client.chat.completions.create(**chat_body(stream=True)):
                    pass


async def test_openais_own_client_is_content() -> None:
    async with world() as w, openai_client(w) as client:
        whole = await client.chat.completions.create(**chat_body())
        assert whole.choices[0].message.content == TEXT
        assert whole._request_id == f"req_{w.owner.requests[0][0].request_id}"
        async with client.chat.completions.stream(**chat_body(), stream_options={"include_usage": True}) as helper:
            kinds = [event.type async for event in helper]
            final = await helper.get_final_completion()
        assert "content.done" in kinds
        assert final.choices[0].message.content == TEXT
        assert final.usage is not None
        assert final.usage.total_tokens == 16
        assert [m.id async for m in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        for call, kind in (
            (client.chat.completions.create(**chat_body(temperature=5)), openai.BadRequestError),
            (client.chat.completions.create(**{**chat_body(), "model": "nope"}), openai.NotFoundError),
        ):
            with pytest.raises(kind) as caught:
                await call
            assert caught.value.request_id


async def test_fifty_streams_at_once_are_each_whole() -> None:
    async def slow(owner: Owner, request: Request, shard: int) -> None:
        await asyncio.sleep(0.05)
        await answer(owner, request, shard)

    async with world(slow) as w:
        for chunks in await asyncio.gather(*(stream(w) for _ in range(50))):
            deltas: list[Delta] = [c["choices"][0]["delta"] for c in chunks[:-1]]
            assert "".join(d.get("content", "") for d in deltas) == TEXT  # type: ignore[attr-defined]
        assert len({r.request_id for r, _ in w.owner.requests}) == 50
