"""Deltas on their way to bytes: chunks, whole answers, outlets."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ingress_stream import delta, end

from ingress.call import Call
from ingress.chunks import DONE, PING, ChatChunks, TextChunks, error_event
from ingress.endings import error_of_refusal
from ingress.errors import ApiError, bad_key, invalid, unavailable
from ingress.logprobs import LOWEST, chat_logprobs, legacy_logprobs
from ingress.outlet import Outlet
from ingress.usage import usage_of
from ingress.whole import Whole
from wire.messages import Body, Refused, Sampling, TokenLogprob

FIELDS = {"id": "chatcmpl-1", "created": 5, "model": 'a"b', "system_fingerprint": "fp"}


def read(events: list[bytes]) -> list[Any]:
    for event in events:
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        assert event.count(b"\n") == 2, "one frame an event"
    return [json.loads(event[6:]) for event in events]


@given(st.lists(st.text(max_size=20), max_size=10), st.booleans())
def test_any_text_survives_being_cut_into_chat_chunks(texts: list[str], include_usage: bool) -> None:
    chunks = ChatChunks(FIELDS, 2, include_usage)
    events = [e for i, text in enumerate(texts) for e in chunks.delta(1, delta(i, (i,), text, choice=1))]
    events += chunks.delta(1, delta(len(texts), (), "", end="length", choice=1))
    parsed = read(events)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in parsed) == "".join(texts)
    assert [c["choices"][0]["delta"].get("role") for c in parsed] == ["assistant"] + [None] * (len(parsed) - 1)
    assert [c["choices"][0]["finish_reason"] for c in parsed] == [None] * (len(parsed) - 1) + ["length"]
    assert all(c["choices"][0]["index"] == 1 and c["model"] == 'a"b' for c in parsed)
    assert all(("usage" in c) is include_usage for c in parsed)


@given(st.lists(st.text(max_size=20), max_size=10), st.text(max_size=10))
def test_any_text_survives_being_cut_into_completion_chunks(texts: list[str], echo: str) -> None:
    chunks = TextChunks(FIELDS, 1, False, [echo])
    events = [e for i, text in enumerate(texts) for e in chunks.delta(0, delta(i, (i,), text))]
    events += chunks.delta(0, delta(len(texts), (), "", end="stop"))
    parsed = read(events)
    assert "".join(c["choices"][0]["text"] for c in parsed) == echo + "".join(texts)
    assert parsed[-1]["choices"][0]["finish_reason"] == "stop"


def test_an_echoed_prompt_shows_how_likely_its_tokens_were_in_every_choice() -> None:
    prompt = (shown("The", 0.0), shown(" sun", -2.0, shown(" end", -1.5)))
    first = msgspec.structs.replace(delta(0, (7,), " is"), logprobs=(shown(" is", -0.5),), prompt=prompt)
    second = msgspec.structs.replace(delta(0, (8,), " was", choice=1), logprobs=(shown(" was", -0.7),))
    last = msgspec.structs.replace(delta(1, (9,), "!", end="stop"), logprobs=(shown("!", -0.1),))
    expected = {
        "tokens": ["The", " sun", " is", "!"],
        "token_logprobs": [None, -2.0, -0.5, -0.1],
        "top_logprobs": [None, {" end": -1.5, " sun": -2.0}, {" is": -0.5}, {"!": -0.1}],
        "text_offset": [0, 3, 7, 10],
    }
    body = Body(sampling=Sampling(seed=1), prompt="The sun", n=2, logprobs=1, prompt_logprobs=1)
    call = Call(endpoint="completions", model="m", bodies=(body,), stream=False, include_usage=False, echo=("The sun",))
    whole = Whole(call)
    whole.delta(0, first)
    whole.delta(1, second)
    whole.delta(0, last)
    choices = json.loads(whole.body({}, [end((2, 1))]))["choices"]
    assert choices[0]["logprobs"] == expected
    assert choices[1]["logprobs"]["tokens"] == ["The", " sun", " was"]
    assert [choice["text"] for choice in choices] == ["The sun is!", "The sun was"]

    chunks = TextChunks(FIELDS, 2, False, ["The sun"] * 2, n=2)
    said = read([*chunks.delta(0, first), *chunks.delta(1, second), *chunks.delta(0, last)])
    pieces = [
        c["choices"][0]["logprobs"] for c in said if c["choices"][0]["index"] == 0 and c["choices"][0]["logprobs"]
    ]
    assert {name: [one for piece in pieces for one in piece[name]] for name in expected} == expected
    assert said[1]["choices"][0]["logprobs"]["text_offset"] == [0, 3, 7]


def shown(token: str, logprob: float, *top: TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token=token, bytes=tuple(token.encode()), logprob=logprob, top=top)


def test_the_usage_chunk_has_no_choices() -> None:
    for chunks in (ChatChunks(FIELDS, 1, True), TextChunks(FIELDS, 1, True, [])):
        (parsed,) = read([chunks.usage(usage_of([end((3,)), end((4,))]))])
        assert parsed["choices"] == []
        assert parsed["usage"]["completion_tokens"] == 7
        assert parsed["usage"]["prompt_tokens"] == 10


def test_constant_frames_are_what_clients_split_by() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert PING == b": ping\n\n"
    assert read([error_event(unavailable("Later."))])[0]["error"]["message"] == "Later."


def token(text: str, logprob: float = -1.0, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(token=text, bytes=tuple(text.encode()), logprob=logprob, top=top)


def test_minus_infinity_is_a_number_that_json_has() -> None:
    one = token("a", -math.inf, (token("b", -math.inf),))
    shown = chat_logprobs([one])["content"][0]
    assert (shown["logprob"], shown["top_logprobs"][0]["logprob"]) == (LOWEST, LOWEST)
    assert legacy_logprobs([one], 0)["token_logprobs"] == [LOWEST]


def test_parts_of_characters_have_names_of_their_own_in_completions() -> None:
    parts = [TokenLogprob(token="\ufffd", bytes=(byte,), logprob=-float(n)) for n, byte in enumerate((0xF0, 0x9F))]
    one = TokenLogprob(token="\ufffd", bytes=(0xF0,), logprob=0.0, top=tuple(parts))
    shown = legacy_logprobs([one, token("\ufffd")], 0)
    assert shown["tokens"] == ["bytes:\\xf0", "\ufffd"]
    assert shown["top_logprobs"][0] == {"bytes:\\xf0": 0.0, "bytes:\\x9f": -1.0}


def test_bytes_of_half_a_character_are_shown_as_they_are() -> None:
    half = TokenLogprob(token="\ufffd", bytes=(0xF0, 0x9F), logprob=-1.0)
    assert chat_logprobs([half])["content"][0]["bytes"] == [0xF0, 0x9F]


def test_errors_carry_what_sdks_read() -> None:
    error = invalid("n", "Too many.")
    assert json.loads(error.body()) == {
        "error": {"message": "Too many.", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    }
    assert error.headers() == [(b"content-type", b"application/json")]
    assert (b"retry-after", b"7") in unavailable("x", retry_after_s=7).headers()
    assert (b"x-should-retry", b"false") in bad_key("x").headers()
    assert (ApiError(429, "x").kind, ApiError(502, "x").kind) == ("rate_limit_error", "server_error")


def test_a_refusal_for_load_always_says_when_to_come_back() -> None:
    for status, wait, told in ((503, None, 1), (429, 9, 9), (400, None, None)):
        refused = Refused(request_id="r", attempt=1, epoch=1, status=status, code=None, message="m", retry_after_s=wait)
        assert error_of_refusal(refused).retry_after_s == told


async def test_an_outlet_gives_in_order_and_ends() -> None:
    outlet = Outlet(100, 60)
    outlet.put([b"a", b"b"])
    outlet.close()
    outlet.put([b"late"])
    assert [outlet.next(), outlet.next(), outlet.next()] == [b"a", b"b", None]
    assert not await outlet.more()


async def test_an_outlet_wakes_who_waits() -> None:
    outlet = Outlet(100, 60)
    waiting = asyncio.create_task(outlet.more())
    await asyncio.sleep(0)
    outlet.put([b"a"])
    assert await waiting
    outlet.close()


async def test_an_outlet_holds_only_so_much() -> None:
    outlet = Outlet(10, 60)
    outlet.put([b"x" * 10])
    assert not outlet.overflowed.done()
    assert outlet.next()
    outlet.put([b"x" * 10])
    outlet.put([b"x"])
    assert outlet.overflowed.done()
    assert outlet.next() is None, "what nobody reads is let go"


async def test_an_outlet_speaks_up_after_silence_only() -> None:
    outlet = Outlet(100, 0.02)
    for _ in range(2):
        assert await outlet.more()
        assert outlet.next() == PING
    outlet.close()


@pytest.mark.parametrize("close_first", [True, False])
async def test_a_closed_outlet_rings_no_more(close_first: bool) -> None:
    outlet = Outlet(100, 0.01)
    waiting = asyncio.create_task(outlet.more())
    await asyncio.sleep(0)
    if close_first:
        outlet.close()
    await asyncio.sleep(0.03)
    outlet.close()
    assert await waiting is not close_first
