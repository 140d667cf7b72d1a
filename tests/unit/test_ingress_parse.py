"""Bodies: what is accepted, what it becomes, and what each refusal says."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingress.chat import ChatBody, parse_chat
from ingress.completions import parse_completions
from ingress.errors import ApiError
from ingress.parse import MAX_DEPTH, json_object
from wire.codec import encode
from wire.messages import Body, ReplyTo, Request, Sampling

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "ping"}}


def seed() -> int:
    return 42


def chat(**fields: Any) -> Body:
    body = {"model": "m", "messages": [USER], **fields}
    return parse_chat(json.dumps(body).encode(), seed).bodies[0]


def refusal(parse: Any = parse_chat, **fields: Any) -> ApiError:
    base: dict[str, Any] = {"messages": [USER]} if parse is parse_chat else {"prompt": "x"}
    with pytest.raises(ApiError) as caught:
        parse(json.dumps({"model": "m", **base, **fields}).encode(), seed)
    assert caught.value.status == 400
    assert caught.value.kind == "invalid_request_error"
    return caught.value


def syntax(raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        json_object(raw)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{nope",
        b"[1]",
        b'"x"',
        b"null",
        b'{"model":"\xff"}',
        b'{"model":"\xed\xa0\x80"}',
        b'{"model":"\\ud800"}',
        b'{"model":"\\udc00x"}',
        b'{"temperature":NaN}',
        b'{"temperature":Infinity}',
        b'{"temperature":1e999}',
        b'{"a":1,"a":2}',
        b'{"a":{"b":1,"c":2,"b":3}}',
        b'{"n":' + b"9" * 5_000 + b"}",
        b'{"a":' + b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b"\xef\xbb\xbf{}",
        b"\x00" * 10,
    ],
)
def test_what_is_not_one_clean_json_object_is_refused(raw: bytes) -> None:
    assert syntax(raw).code == "invalid_json"


def test_depth_up_to_the_bound_is_fine() -> None:
    depth = MAX_DEPTH - 1
    assert json_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


def test_a_doubled_key_is_named() -> None:
    assert syntax(b'{"model":"a","model":"b"}').param == "model"


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(raw: bytes) -> None:
    with contextlib.suppress(ApiError):
        assert isinstance(json_object(raw), dict)


@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=10))
def test_any_value_in_any_place_is_a_call_or_a_400(value: Any) -> None:
    for name in ("messages", "stop", "n", "temperature", "tools", "tool_choice", "logit_bias", "response_format"):
        raw = json.dumps({"model": "m", "messages": [USER], name: value}).encode("utf-8", "surrogatepass")
        with contextlib.suppress(ApiError):
            assert parse_chat(raw, seed).bodies


def chat_fields() -> list[str]:
    return [name for name in ChatBody.__struct_fields__ if name not in ("model", "messages")]


def test_absent_and_null_are_openais_defaults() -> None:
    names = [*chat_fields(), "user", "metadata", "store"]
    assert chat() == chat(**dict.fromkeys(names))
    assert chat() == Body(sampling=Sampling(seed=42), messages=({"role": "user", "content": "hi"},))


def test_everything_the_engine_can_do_arrives_there() -> None:
    body = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"7": -100},
        seed=-5,
        stop=["a", "b"],
        n=3,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        logprobs=True,
        top_logprobs=4,
    )
    assert body.sampling == Sampling(
        seed=-5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias={"7": -100.0},
    )
    assert (body.stop, body.n, body.max_tokens, body.min_tokens) == (("a", "b"), 3, 9, 2)
    assert (body.ignore_eos, body.logprobs) == (True, 4)


def test_a_body_of_the_widest_seeds_fits_the_log() -> None:
    for value in (-(2**63), 2**63, 2**64 - 1):
        body = chat(seed=value)
        assert body.sampling.seed == value
        request = Request(
            request_id="r",
            attempt=1,
            tenant="t",
            project="p",
            key_id="k",
            model="m",
            version="1",
            body=body,
            reply=ReplyTo(region="local", slot=0, incarnation="i"),
            created_ms=0,
            accept_by_ms=1,
            deadline_ms=2,
        )
        assert encode(request)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 10**6),
        ("n", 2**70),
        ("n", 1.5),
        ("n", "1"),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_completion_tokens", 0),
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("min_p", 2),
        ("top_k", -2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", "x"),
        ("top_logprobs", 21),
        ("top_logprobs", 2),
        ("logprobs", 1),
        ("stop", ["a"] * 5),
        ("stop", [str(i) for i in range(10**5)]),
        ("stop", ""),
        ("stop", "x" * 1001),
        ("stop", 5),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {str(i): 1 for i in range(2_000)}),
        ("stream_options", {"include_usage": True}),
        ("stream", "yes"),
        ("best_of", 2),
        ("min_tokens", -1),
        ("tools", []),
        ("tools", [{"type": "retrieval"}]),
        ("tools", [{"type": "function", "function": {"name": "no spaces"}}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "sound"}),
        ("response_format", {"type": ["text"]}),
        ("response_format", {}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x y", "schema": {}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": True}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": "yes"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("parallel_tool_calls", "no"),
        ("function_call", "auto"),
        ("tools", [TOOL, TOOL]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]),
        ("response_format", "text"),
        ("modalities", ["text", "audio"]),
        ("functions", [{"name": "f"}]),
        ("web_search_options", {}),
        ("model", 5),
        ("model", None),
        ("messages", None),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [1]),
    ],
)
def test_a_value_out_of_bounds_names_its_parameter(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert (error.param or "").split(".")[0].split("[")[0] == field
    assert field in error.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{}], "messages[0].role"),
        ([{"role": 123}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([USER, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "video"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": []}]}], "messages[0].content[0].type"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
    ],
)
def test_a_bad_message_is_named(messages: Any, param: str) -> None:
    assert refusal(messages=messages).param == param


def test_messages_are_normalised_without_loss() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    body = chat(
        messages=[
            {"role": "developer", "content": "Be brief.", "id": 7},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "pong"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        ]
    )
    assert body.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "pong", "tool_call_id": "c1"},
        {"role": "assistant", "content": "no"},
    )


def test_tools_and_the_choice_among_them_reach_the_engine() -> None:
    body = chat(tools=[TOOL])
    assert body.tools[0]["function"]["name"] == "ping"
    assert (body.tool_choice, body.parallel_tool_calls) == ("auto", True)
    assert "strict" not in body.tools[0]["function"]
    strict = {"type": "function", "function": {"name": "ping", "strict": True}}
    assert chat(tools=[strict], parallel_tool_calls=False).tools[0]["function"]["strict"] is True
    assert not chat(tools=[strict], parallel_tool_calls=False).parallel_tool_calls
    assert chat(tools=[TOOL], tool_choice="none").tool_choice == "none"
    assert chat(tools=[TOOL], tool_choice="required").tool_choice == "required"
    assert chat(tool_choice="auto").tool_choice == "auto"
    named = {"type": "function", "function": {"name": "ping"}}
    assert chat(tools=[TOOL], tool_choice={**named, "more": 1}).tool_choice == named


def test_of_the_tools_only_those_that_are_allowed_reach_the_engine() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]
    for mode in ("auto", "required"):
        allowance = {"mode": mode, "tools": [tools[2], {**tools[0], "more": 1}]}
        body = chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowance})
        assert [tool["function"]["name"] for tool in body.tools] == ["a", "c"]
        assert body.tool_choice == mode


@pytest.mark.parametrize(
    "allowance",
    [
        None,
        {},
        {"mode": "auto"},
        {"mode": "auto", "tools": []},
        {"mode": "none", "tools": [TOOL]},
        {"mode": "auto", "tools": [{"type": "function"}]},
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "nope"}}]},
    ],
)
def test_an_allowance_that_says_nothing_is_refused(allowance: object) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowance}
    assert refusal(tools=[TOOL], tool_choice=choice).param == "tool_choice"
    assert refusal(tool_choice=choice).param == "tool_choice"


def test_a_choice_that_there_isnt_is_refused() -> None:
    bad_name = {"type": "function", "function": {"name": []}}
    for choice in ("sometimes", {"type": "x"}, {"type": "function", "name": "ping"}, 5, [], bad_name):
        assert refusal(tools=[TOOL], tool_choice=choice).param == "tool_choice"
    named = {"type": "function", "function": {"name": "nope"}}
    assert "not in 'tools'" in refusal(tools=[TOOL], tool_choice=named).message


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=9, max_completion_tokens=3).max_tokens == 3


def test_min_tokens_over_the_limit_is_refused() -> None:
    assert refusal(max_tokens=3, min_tokens=4).param == "min_tokens"


def completion(**fields: Any) -> tuple[Body, ...]:
    return parse_completions(json.dumps({"model": "m", **fields}).encode(), seed).bodies


def test_prompts_of_every_form_become_a_body_each() -> None:
    assert [b.prompt for b in completion(prompt="a b")] == ["a b"]
    assert [b.prompt for b in completion(prompt=["a", "b"])] == ["a", "b"]
    assert [b.prompt for b in completion(prompt=[5, 6])] == [(5, 6)]
    assert [b.prompt for b in completion(prompt=[[5, 6], [7]])] == [(5, 6), (7,)]
    assert completion(prompt="a")[0].max_tokens == 16, "OpenAI's default"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", ["a", 1]),
        ("prompt", [[]]),
        ("prompt", [[1], "a"]),
        ("prompt", [-1]),
        ("prompt", [2**31]),
        ("prompt", [True]),
        ("prompt", [1.5]),
        ("prompt", ["x"] * 129),
        ("suffix", "y"),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("best_of", 3),
    ],
)
def test_a_bad_completion_names_its_parameter(field: str, value: Any) -> None:
    assert refusal(parse_completions, **{field: value}).param == field


def test_echo_is_only_promised_where_it_is_right() -> None:
    call = parse_completions(b'{"model":"m","prompt":["a","b"],"echo":true}', seed)
    assert call.echo == ("a", "b")
    assert refusal(parse_completions, prompt=[1, 2], echo=True).param == "echo"
    assert call.bodies[0].prompt_logprobs is None
    shown = parse_completions(b'{"model":"m","prompt":"a","echo":true,"logprobs":2}', seed).bodies[0]
    assert (shown.logprobs, shown.prompt_logprobs) == (2, 2)


def test_n_times_prompts_is_bounded() -> None:
    assert refusal(parse_completions, prompt=["x"] * 65, n=2).param == "n"


def test_a_response_format_is_passed_on_as_it_holds() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "description": "d"}}
    assert chat(response_format={"type": "text"}).response_format is None
    assert chat(response_format={"type": "json_object", "more": 1}).response_format == {"type": "json_object"}
    passed = chat(response_format=form).response_format
    assert passed == {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    assert list(passed["json_schema"]["schema"]["properties"]) == ["b", "a"], "the order is the schema's"
