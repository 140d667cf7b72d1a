"""Answers with tool calls: however the text is cut, streams and whole answers show the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ingress_shape import FIELDS, read, token
from test_ingress_stream import delta, end

from ingress.answer import WholeAnswer
from ingress.call import Call
from ingress.call_chunks import CallChunks
from ingress.calls import Arguments, Begun, CallReader, Piece, Text, call_id
from wire.calls import BETWEEN, OPENING, TAIL, head_of
from wire.messages import Body, ChoiceEnd, Sampling

TOOL = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}
AUTO = Body(sampling=Sampling(seed=0), tools=(TOOL,), tool_choice="auto")
MUST = msgspec.structs.replace(AUTO, tool_choice="required")
NAMES = st.text(alphabet="abcXYZ019_-", min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[]</tool_call>\n 안🌾', max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(alphabet='k"\\}', max_size=4), VALUES, max_size=3).map(json.dumps)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), max_size=3)
PROSE = st.lists(
    st.sampled_from(["Sure. ", "<", "<tool", "_call>", "안녕 ", "\n", "</tool_call>", "{"]), max_size=6
).map("".join)


def written(calls: list[tuple[str, str]]) -> str:
    """As the model writes them."""
    return BETWEEN.join(head_of(name) + arguments + TAIL for name, arguments in calls)


def whole(before: str, calls: list[tuple[str, str]]) -> str:
    return before + (OPENING + written(calls) if calls else "")


def cut(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[begin:stop] for begin, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(body: Body, pieces: list[str], finish: ChoiceEnd) -> list[Any]:
    """The events of a stream whose deltas have these texts; the last one ends the choice."""
    chunks = CallChunks(FIELDS, 1, False, body)
    deltas = [delta(index, (index,), text) for index, text in enumerate(pieces)]
    deltas[-1] = msgspec.structs.replace(deltas[-1], end=finish)
    return read([event for one in deltas for event in chunks.delta(0, one)])


def put_together(events: list[Any]) -> dict[str, Any]:
    """What a client makes of a stream, as OpenAI's own library does it."""
    message: dict[str, Any] = {}
    for event in events:
        change = event["choices"][0]["delta"]
        if "role" in change:
            assert not message, "the role comes once, first"
            message = {"role": change["role"], "content": None, "refusal": None}
        if change.get("content") is not None:
            message["content"] = (message["content"] or "") + change["content"]
        for part in change.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if "id" in part:
                assert part["index"] == len(calls)
                assert set(part) == {"index", "id", "type", "function"}
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                assert set(part) == {"index", "function"}
                assert set(part["function"]) == {"arguments"}
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message


async def answered(body: Body, text: str, finish: ChoiceEnd) -> dict[str, Any]:
    call = Call(endpoint="chat", model="m", bodies=(body,), stream=False, include_usage=False)
    answer = WholeAnswer(call, dict(FIELDS))
    answer.delta(0, delta(0, (1,), text, end=finish))
    answer.ended(0, end((1,), (finish,)))
    done = await answer.done
    assert isinstance(done, bytes)
    choice: dict[str, Any] = orjson.loads(done)["choices"][0]
    return choice


@given(PROSE, CALLS, st.data())
async def test_a_stream_joins_to_the_whole_answer_however_it_is_cut(
    before: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    before = before.replace(OPENING, "")
    text, finish = whole(before, calls), "tool_calls" if calls else "stop"
    events = streamed(AUTO, cut(data, text), finish)  # type: ignore[arg-type]
    message = put_together(events)
    choice = await answered(AUTO, text, finish)  # type: ignore[arg-type]
    assert choice["message"] | {"content": message["content"]} == message
    assert (choice["message"]["content"] or "") == (message["content"] or "") == before
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + [finish]
    shown = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
    assert shown == calls


@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=2), st.integers(0, 400), st.data())
async def test_an_answer_that_is_all_calls_shows_no_markup_wherever_it_is_cut_short(
    calls: list[tuple[str, str]], length: int, data: st.DataObject
) -> None:
    text = whole("", calls)[:length]
    events = streamed(MUST, cut(data, text), "length")
    message = put_together(events)
    choice = await answered(MUST, text, "length")
    assert choice["message"] == message
    assert message["content"] is None
    for shown, (name, arguments) in zip(message.get("tool_calls", []), calls, strict=False):
        assert shown["function"]["name"] == name
        assert arguments.startswith(shown["function"]["arguments"]), "literal, never written anew"


def test_the_first_event_of_a_call_has_its_id_and_name() -> None:
    events = streamed(MUST, [OPENING, head_of("ping") + '{"a"', ': "}"}', TAIL], "tool_calls")
    first, *others = [event["choices"][0]["delta"] for event in events]
    assert first == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "index": 0,
                "id": call_id("chatcmpl-1", 0, 0),
                "type": "function",
                "function": {"name": "ping", "arguments": ""},
            }
        ],
    }
    assert others == [
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ': "}"}'}}]},
        {},
    ]


def test_only_what_may_become_a_call_is_held_back() -> None:
    reader = CallReader(must=False)
    assert reader.feed("a < b, <tool_") == [Text("a < b, ")]
    assert reader.feed("box") == [Text("<tool_box")]
    assert reader.feed("<tool_call") == []
    assert reader.finish("stop") == [Text("<tool_call")]


def test_ids_are_the_same_however_often_the_answer_is_read() -> None:
    assert call_id("chatcmpl-1", 0, 0) == call_id("chatcmpl-1", 0, 0)
    assert len({call_id(answer, choice, index) for answer in "ab" for choice in (0, 1) for index in (0, 1)}) == 8
    assert len(call_id("x", 0, 0)) <= 40, "what OpenAI takes back"


@pytest.mark.parametrize(
    ("text", "finish", "pieces"),
    [
        ("<tool_call>no json", "stop", [Text("<tool_call>no json")]),
        ("<tool_call>no json", "length", []),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "stop", [Begun(0, "f"), Arguments(0, "{}")]),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call> \n', "stop", [Begun(0, "f"), Arguments(0, "{}")]),
        (
            '<tool_call>{"name":"f","arguments":{}}</tool_call>and so on',
            "stop",
            [Begun(0, "f"), Arguments(0, "{}"), Text("and so on")],
        ),
    ],
)
def test_what_no_grammar_bound_is_still_shown(text: str, finish: ChoiceEnd, pieces: list[Piece]) -> None:
    reader = CallReader(must=False)
    assert [*reader.feed(text), *reader.finish(finish)] == pieces


def test_every_token_has_its_logprob_in_a_stream_too() -> None:
    chunks = CallChunks(FIELDS, 1, False, MUST)
    texts = [OPENING, head_of("ping"), "{}", TAIL]
    events = [e for i, text in enumerate(texts) for e in chunks.delta(0, delta(i, (i,), text, logprobs=(token(text),)))]
    events += chunks.delta(0, delta(4, (), "", end="tool_calls"))
    shown = [event["choices"][0]["logprobs"] for event in read(events)]
    assert [one["token"] for each in shown if each for one in each["content"]] == texts


def test_an_empty_answer_has_its_role_and_its_end() -> None:
    for body, content in ((AUTO, ""), (MUST, None)):
        first, last = (event["choices"][0]["delta"] for event in streamed(body, [""], "length"))
        assert (first, last) == ({"role": "assistant", "content": content}, {})


def test_usage_is_told_without_choices() -> None:
    (event,) = read([CallChunks(FIELDS, 1, True, AUTO).usage({"total_tokens": 1})])
    assert (event["choices"], event["usage"]) == ([], {"total_tokens": 1})
