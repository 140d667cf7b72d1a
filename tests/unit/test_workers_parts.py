"""The worker's small pure parts: presence, preparation, the gate, the watermark."""

from __future__ import annotations

import msgspec
import pytest
from shard_world import FLEET, make_request

from wire.messages import DemandSignal, EngineSignal, Refusal, ReplyTo, Sampling
from workers.effects import Prepared
from workers.engine.protocol import Key, Sequence
from workers.engine.simulated_vocabulary import WORDS, SimulatedVocabulary
from workers.engine.vocabulary import Messages
from workers.gate import Gate
from workers.owner import oldest_hint
from workers.prepare import is_quick, prepare
from workers.presence import Presence
from workers.watermark import BadHint, Hint, Watermark

READER = ReplyTo(region="local", slot=2, incarnation="x")


def own(at_ms: int) -> EngineSignal:
    return EngineSignal(
        engine="e", incarnation="i", fleet=FLEET, shards=(0,), state="ready", model="m", fingerprint=None,
        at_ms=at_ms, queued_requests=0, queued_tokens=0, running=0, slots=1,
    )  # fmt: skip


def life(at_ms: int) -> DemandSignal:
    return DemandSignal(ingress="a", slot=2, incarnation="x", region="local", model="", at_ms=at_ms)


def test_a_reader_is_gone_after_the_grace_of_silence() -> None:
    presence = Presence("e", "i", 30_000)
    presence.hear(own(1_000))
    presence.hear(life(1_000))
    presence.hear(own(31_000))
    assert presence.vanished([READER]) == []
    presence.hear(own(31_001))
    assert presence.vanished([READER]) == [READER]


def test_silence_counts_only_while_own_signals_come_back() -> None:
    presence = Presence("e", "i", 30_000)
    presence.hear(own(1_000))
    presence.hear(life(1_000))
    for _ in range(100):  # the log is away: nothing is heard, and no time passes
        assert presence.vanished([READER]) == []
    other = msgspec.structs.replace(own(90_000), incarnation="another life")
    presence.hear(other)
    assert presence.vanished([READER]) == []


def test_a_reader_never_heard_has_its_grace_from_now_on() -> None:
    presence = Presence("e", "i", 30_000)
    assert presence.vanished([READER]) == []
    presence.hear(own(50_000))
    assert presence.vanished([READER]) == []
    presence.hear(own(80_001))
    assert presence.vanished([READER]) == [READER]


def test_a_prompt_is_prepared_with_what_the_context_leaves() -> None:
    request = make_request(1, 0, max_tokens=5)
    prepared = prepare(request, SimulatedVocabulary(), 100, 8)
    assert isinstance(prepared, Prepared)
    assert prepared.max_tokens == 5
    tokens = len(prepared.prompt)
    tight = prepare(request, SimulatedVocabulary(), tokens + 2, 8)
    assert isinstance(tight, Prepared)
    assert tight.max_tokens == 2
    full = prepare(request, SimulatedVocabulary(), tokens, 8)
    assert isinstance(full, Refusal)
    assert (full.status, full.code, full.param) == (400, "context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": (), "messages": ()}, "prompt"),
        ({"prompt": (10**9,), "messages": ()}, "prompt"),
        ({"n": 9}, "n"),
        ({"sampling": Sampling(seed=1, logit_bias={"99999999": 1.0})}, "logit_bias"),
        ({"sampling": Sampling(seed=1, logit_bias={"-1": 1.0})}, "logit_bias"),
        ({"sampling": Sampling(seed=1, logit_bias={"²": 1.0})}, "logit_bias"),
    ],
)
def test_what_only_the_model_can_refuse_is_refused_by_name(changes: dict[str, object], param: str) -> None:
    request = make_request(1, 0)
    body = msgspec.structs.replace(request.body, **changes)
    refused = prepare(msgspec.structs.replace(request, body=body), SimulatedVocabulary(), 100, 8)
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code, refused.param) == (400, "invalid_value", param)


BROKEN = {"type": "object", "properties": {"a": {"type": "hiccup"}}}
LONG = {"type": "object", "properties": {"a": {"enum": [f"value {index}" for index in range(3_000)]}}}
FINE = {"type": "object", "properties": {"a": {"type": "string"}}}


def tool(name: str, parameters: dict[str, object]) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def form(schema: dict[str, object], **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"response_format": form(BROKEN)}, "response_format.json_schema.schema", "hiccup"),
        ({"response_format": form({**FINE, "not": {}}, strict=True)}, "response_format.json_schema.schema", "not"),
        ({"tools": (tool("f", FINE), tool("g", BROKEN))}, "tools[1].function.parameters", "hiccup"),
        ({"tools": tuple(tool(f"f{i}", LONG | {"title": str(i)}) for i in range(40))}, "tools[0]", "big"),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_by_name(
    changes: dict[str, object], param: str, words: str
) -> None:
    body = msgspec.structs.replace(make_request(1, 0).body, **changes)
    refused = prepare(msgspec.structs.replace(make_request(1, 0), body=body), SimulatedVocabulary(), 10**7, 8)
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (400, "invalid_value")
    assert (refused.param or "").startswith(param)
    assert words in refused.message
    assert param in refused.message


def test_an_answers_form_is_prepared_with_the_prompt_and_off_the_event_loop() -> None:
    plain = make_request(1, 0)
    shaped = msgspec.structs.replace(plain, body=msgspec.structs.replace(plain.body, response_format=form(FINE)))
    calling = msgspec.structs.replace(plain, body=msgspec.structs.replace(plain.body, tools=(tool("f", FINE),)))
    assert [is_quick(one) for one in (plain, shaped, calling)] == [True, False, False]
    for request, calls in ((shaped, False), (calling, True)):
        prepared = prepare(request, SimulatedVocabulary(), 200, 8)
        assert isinstance(prepared, Prepared)
        assert prepared.grammar is not None
        assert prepared.grammar.calls is calls
    assert prepare(plain, SimulatedVocabulary(), 200, 8).grammar is None  # type: ignore[union-attr]


class Untouched(SimulatedVocabulary):
    def encode_chat(self, messages: Messages, tools: Messages = ()) -> tuple[int, ...]:
        raise AssertionError("nobody waits for megabytes to be tokenised")

    encode_text = encode_chat  # type: ignore[assignment]


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": ({"role": "user", "content": "word " * 1_600_000},)},
        {"tools": ({"type": "function", "function": {"name": "f", "description": "d" * 8_000_000}},)},
        {"messages": (), "prompt": "🌾" * 2_000_000},
    ],
)
def test_what_is_surely_too_long_is_refused_unread(changes: dict[str, object]) -> None:
    request = make_request(1, 0)
    body = msgspec.structs.replace(request.body, **changes)
    refused = prepare(msgspec.structs.replace(request, body=body), Untouched(), 2048, 8)
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.code) == (400, "context_length_exceeded")


def test_no_text_that_fits_is_taken_for_too_long() -> None:
    longest = max(WORDS, key=len)
    prompt = f" {longest}" * 100  # 100 tokens, as long as tokens get
    body = msgspec.structs.replace(make_request(1, 0).body, messages=(), prompt=prompt)
    prepared = prepare(msgspec.structs.replace(make_request(1, 0), body=body), SimulatedVocabulary(), 101, 8)
    assert isinstance(prepared, Prepared)
    assert len(prepared.prompt) == 100


class Said:
    def __init__(self) -> None:
        self.said: list[object] = []

    def add(self, sequence: Sequence) -> None:
        self.said.append(sequence.key)

    def cancel(self, key: Key) -> None:
        self.said.append(("cancel", key))

    def drop(self, shard: int, epoch: int) -> None:
        self.said.append(("drop", shard, epoch))


def sequence(shard: int, epoch: int, ref: int) -> Sequence:
    return Sequence(key=Key(shard, epoch, ref), prompt=(1,), max_tokens=1, sampling=make_request(1, 0).body.sampling)


def test_a_shut_gate_keeps_what_is_still_wanted() -> None:
    said = Said()
    gate = Gate(said)
    gate.add(sequence(0, 1, 0))
    gate.shut()
    for key in ((0, 1, 2), (0, 1, 4), (1, 5, 6)):
        gate.add(sequence(*key))
    gate.cancel(Key(0, 1, 2))
    gate.drop(1, 5)
    assert said.said == [Key(0, 1, 0)]
    gate.open()
    gate.cancel(Key(0, 1, 4))
    gate.drop(0, 1)
    assert said.said == [Key(0, 1, 0), Key(0, 1, 4), ("cancel", Key(0, 1, 4)), ("drop", 0, 1)]


def test_a_watermark_stops_at_the_first_record_without_effect() -> None:
    mark = Watermark(5)
    assert [mark.read(o) for o in (5, 6, 7, 6)] == [True, True, True, False]
    mark.passed(6)
    assert mark.committable == 5
    mark.passed(5)
    assert mark.committable == 7
    mark.passed(7)
    assert mark.committable == 8


def test_the_older_lane_decides_where_the_journal_is_read_from() -> None:
    assert oldest_hint(["7:3", "5:1"]) == Hint(5, 1)
    assert oldest_hint([]) is None
    assert oldest_hint(["7:3", "not ours"]) is None
    with pytest.raises(BadHint):
        Hint.parse("7")
