"""Streams many chats at once through a stack's HTTP surface and keeps what came, for acceptance tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from stack import Handle, wait_for

PATIENCE_S = 240.0


@dataclass
class Chat:
    """One streamed chat, as the client saw it."""

    seed: int
    body: dict[str, Any]
    status: int = 0
    request_id: str = ""
    text: str = ""
    pieces: int = 0
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    done: bool = False

    @property
    def completion_tokens(self) -> int:
        assert self.usage is not None, f"seed {self.seed}: no usage; error {self.error}, text {self.text[-40:]!r}"
        return int(self.usage["completion_tokens"])

    @property
    def prompt_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens"])


@dataclass
class Crowd:
    """Several chats that run together."""

    stack: Handle
    chats: list[Chat] = field(default_factory=list)

    @property
    def pieces(self) -> int:
        return sum(chat.pieces for chat in self.chats)


def chat_body(stack: Handle, seed: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": stack.model,
        "messages": [{"role": "user", "content": f"Tell me fact number {seed} about rivers."}],
        "seed": seed,
        "temperature": 0.8,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


async def stream(client: httpx.AsyncClient, stack: Handle, chat: Chat) -> None:
    """Run one chat to its end, or to where its connection breaks."""
    async with client.stream(
        "POST", stack.base_url + "/chat/completions", json=chat.body, headers=stack.headers
    ) as response:
        chat.status = response.status_code
        chat.request_id = response.headers["x-request-id"].removeprefix("req_")
        if response.status_code != 200:
            chat.error = json.loads(await response.aread())
            return
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                take(chat, line.removeprefix("data: "))


def take(chat: Chat, data: str) -> None:
    if data == "[DONE]":
        chat.done = True
        return
    event = json.loads(data)
    if "error" in event:
        chat.error = event["error"]
        return
    chat.usage = event.get("usage") or chat.usage
    for choice in event["choices"]:
        chat.text += choice["delta"].get("content") or ""
        chat.pieces += bool(choice["delta"].get("content"))
        chat.finish = choice["finish_reason"] or chat.finish


async def _together(
    crowd: Crowd, midway: Callable[[], Awaitable[None]] | None, midway_after_pieces: int, tolerate: bool
) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:
        running = asyncio.gather(
            *(stream(client, crowd.stack, chat) for chat in crowd.chats), return_exceptions=tolerate
        )
        if midway is not None:
            while crowd.pieces < midway_after_pieces and not running.done():  # noqa: ASYNC110 (twelve writers)
                await asyncio.sleep(0.01)
            assert not running.done(), "the chats were over before anything could be killed"
            await midway()
        await running


def run_chats(
    stack: Handle,
    seeds: Sequence[int],
    max_tokens: int,
    *,
    midway: Callable[[], None] | None = None,
    after_pieces: int = 0,
    tolerate: bool = False,
    **more: Any,
) -> list[Chat]:
    """All at once; `midway` happens (in a thread) once `after_pieces` pieces of text have come."""
    crowd = Crowd(stack, [Chat(seed, chat_body(stack, seed, max_tokens, **more)) for seed in seeds])
    between = None if midway is None else (lambda: asyncio.to_thread(midway))
    asyncio.run(_together(crowd, between, after_pieces, tolerate))
    return crowd.chats


def check_complete(chats: Sequence[Chat]) -> None:
    """Every stream came to a regular end."""
    for chat in chats:
        assert chat.status == 200, f"seed {chat.seed}: {chat.status} {chat.error}"
        assert chat.error is None, f"seed {chat.seed}: {chat.error}"
        assert chat.done, f"seed {chat.seed}: no [DONE] after {chat.text[-40:]!r}"
        assert chat.finish in ("stop", "length")


def ledger_lines(stack: Handle, request_ids: Sequence[str], timeout_s: float = 60.0) -> dict[str, list[dict[str, Any]]]:
    """The ledger's lines of these requests, once every one has at least one."""
    wanted = set(request_ids)

    def lines() -> dict[str, list[dict[str, Any]]] | None:
        quoted = ", ".join(f"'{one}'" for one in wanted)
        found: dict[str, list[dict[str, Any]]] = {}
        for row in stack.sql(f"SELECT * FROM ledger WHERE request_id IN ({quoted})"):
            found.setdefault(row["request_id"], []).append(row)
        return found if set(found) == wanted else None

    result = wait_for(lines, f"{len(wanted)} requests have ledger lines", timeout_s)
    assert isinstance(result, dict)
    return result


def check_bill(stack: Handle, chats: Sequence[Chat]) -> None:
    """One ledger line a chat, with what the client was told; and the journals agree with the ledger."""
    lines = ledger_lines(stack, [chat.request_id for chat in chats])
    for chat in chats:
        (line,) = lines[chat.request_id]
        told = (chat.prompt_tokens, chat.completion_tokens)
        assert (int(line["prompt_tokens"]), int(line["completion_tokens"])) == told
    verified = stack.verify()
    assert verified.returncode == 0, verified.stdout + verified.stderr
