"""The real SmolLM2 behind the whole pipeline: unmodified clients, many streams at once, and a bill that adds up."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import openai
import pytest
from chats import chat_body, check_bill, check_complete, ledger_lines, run_chats
from stack import Handle, running_stack

pytestmark = [pytest.mark.kafka, pytest.mark.model, pytest.mark.timeout(600)]
HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with running_stack("torch", tmp_path_factory.mktemp("model")) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Handle) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0, timeout=120)


def test_the_openai_client_lists_streams_and_asks(stack: Handle, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [stack.model]
    unary = client.chat.completions.create(model=stack.model, messages=HI, max_tokens=12, seed=1)
    assert unary.choices[0].message.content
    assert unary.usage is not None
    assert unary.usage.total_tokens == unary.usage.prompt_tokens + unary.usage.completion_tokens
    parts = client.chat.completions.create(model=stack.model, messages=HI, max_tokens=12, seed=1, stream=True)
    joined = "".join(part.choices[0].delta.content or "" for part in parts)
    assert joined == unary.choices[0].message.content


def test_the_openai_client_gets_typed_errors(stack: Handle, client: openai.OpenAI) -> None:
    stranger = openai.OpenAI(base_url=stack.base_url, api_key="sk-ms-nobody-nothing", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=stack.model, messages=HI, temperature=5)
    assert bad.value.param == "temperature"


def test_a_prompt_over_the_context_is_a_400_before_any_event(stack: Handle, client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 20_000}]
    for streamed in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(model=stack.model, messages=long, stream=streamed)
        assert bad.value.code == "context_length_exceeded"


def test_fifty_at_once_each_answer_as_if_alone_and_the_bill_is_the_sum(stack: Handle) -> None:
    seeds = range(50)
    together = run_chats(stack, seeds, 8)
    check_complete(together)
    alone = [run_chats(stack, [seed], 8)[0] for seed in seeds]
    assert [chat.text for chat in together] == [chat.text for chat in alone]
    check_bill(stack, together + alone)
    lines = ledger_lines(stack, [chat.request_id for chat in together + alone])
    everything = stack.sql(
        "SELECT sum(prompt_tokens) AS prompt, sum(completion_tokens) AS completion FROM ledger WHERE reason IN"
        f" ('stop', 'length') AND request_id IN ({', '.join(repr(one) for one in lines)})"
    )[0]
    assert int(everything["prompt"]) == sum(chat.prompt_tokens for chat in together + alone)
    assert int(everything["completion"]) == sum(chat.completion_tokens for chat in together + alone)


def test_the_bill_is_the_sum_of_what_all_clients_were_told(stack: Handle) -> None:
    before = bill(stack)
    chats = run_chats(stack, range(60, 66), 8)
    check_bill(stack, chats)
    after = bill(stack)
    told = sum(chat.prompt_tokens + chat.completion_tokens for chat in chats)
    assert after["tokens"] - before["tokens"] == told
    assert after["requests"] - before["requests"] == len(chats)


def bill(stack: Handle) -> dict[str, int]:
    done = stack.command("bill", "--json")
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)
    totals = lines["total"]
    return {"requests": totals["requests"], "tokens": totals["prompt_tokens"] + totals["completion_tokens"]}


@pytest.mark.parametrize("victim", ["worker", "engine"])
def test_killed_mid_stream_the_real_model_continues_token_by_token(stack: Handle, victim: str) -> None:
    seeds = range(200, 204)
    alone = [run_chats(stack, [seed], 24)[0].text for seed in seeds]

    def harm() -> None:
        if victim == "worker":
            stack.kill("worker-0")
        else:
            os.kill(stack.engine_pids()[0], signal.SIGKILL)

    chats = run_chats(stack, seeds, 24, midway=harm, after_pieces=24)
    check_complete(chats)
    assert [chat.text for chat in chats] == alone
    stack.wait_ready()
    check_bill(stack, chats)


def test_korean_and_emoji_are_never_cut_in_a_stream(stack: Handle, client: openai.OpenAI) -> None:
    said = [{"role": "user", "content": "Repeat exactly: 안녕하세요 세계 🤖🧑‍🚀 日本語 ďábel"}]
    for seed in range(2):
        body = {"model": stack.model, "messages": said, "max_tokens": 24, "seed": seed}
        unary = client.chat.completions.create(**body).choices[0].message.content
        parts = client.chat.completions.create(**body, stream=True)
        texts = [part.choices[0].delta.content or "" for part in parts]
        assert "".join(texts) == unary


def test_the_openai_client_gets_calls_and_json_streamed_and_whole_alike(stack: Handle, client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    body = {"model": stack.model, "messages": HI, "max_tokens": 120, "seed": 1}
    forced = {**body, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    choice = client.chat.completions.create(**forced).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "get_weather")
    assert set(json.loads(call.function.arguments)) == {"city"}
    parts = [part.choices[0].delta for part in client.chat.completions.create(**forced, stream=True)]
    streamed = [one for part in parts for one in part.tool_calls or ()]
    assert streamed[0].function.name == "get_weather"
    assert streamed[0].id.startswith("call_")
    assert "".join(one.function.arguments for one in streamed) == call.function.arguments
    schema = {"name": "x", "strict": True, "schema": {**parameters, "additionalProperties": False}}
    bound = {**body, "response_format": {"type": "json_schema", "json_schema": schema}}
    text = client.chat.completions.create(**bound).choices[0].message.content
    assert set(json.loads(text)) == {"city"}
    parts = [part.choices[0].delta for part in client.chat.completions.create(**bound, stream=True)]
    assert "".join(part.content or "" for part in parts) == text
    bound["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}}
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**bound)
    assert bad.value.param == "response_format.json_schema.schema"


def test_stop_strings_and_limits_hold(stack: Handle, client: openai.OpenAI) -> None:
    body = chat_body(stack, 3, 16, stream=False) | {"stream_options": None}
    whole = client.chat.completions.create(**body).choices[0].message.content
    assert whole is not None
    stop = whole.split()[3]
    cut = client.chat.completions.create(**body | {"stop": stop}).choices[0]
    assert cut.message.content == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    one = client.chat.completions.create(**body | {"max_tokens": 1})
    assert one.usage is not None
    assert (one.usage.completion_tokens, one.choices[0].finish_reason) == (1, "length")
