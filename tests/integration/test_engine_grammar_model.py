"""The real model and tokenizer bound to a form: valid whatever the seed, and the same bytes after a resume anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from engine_world import make_sequence, restored_at, run

from ingress.calls import Arguments, Begun, CallReader, Text
from millstream.model import prepare
from millstream.paths import cache_dir
from wire.messages import Body, Ref, Sampling
from workers.engine.errors import Uncompilable
from workers.engine.protocol import Key, Sequence
from workers.engine.runner import load_runner
from workers.engine.scheduler import Limits
from workers.engine.shape import shape_of
from workers.engine.tokenizer import Tokenizer
from workers.engine.torch_engine import TorchEngine

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
LIMITS = Limits(slots=8, context_tokens=640, kv_tokens=8 * 640, chunk_tokens=256, step_tokens=256)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email", "maxLength": 30},
        "tags": {"type": "array", "items": {"enum": ["young", "old", "🌾"]}, "maxItems": 2},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}, {"type": "null"}]},
    {"type": "object", "properties": {"day": {"type": "string", "format": "date"}, "kind": {"enum": ["a", "b"]}},
     "required": ["day", "kind"], "additionalProperties": False},
]  # fmt: skip
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather for a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare(cache_dir(), print)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def engine(model_dir: Path, tokenizer: Tokenizer) -> TorchEngine:
    runner = load_runner(model_dir, slots=LIMITS.slots, context_tokens=LIMITS.context_tokens, threads=1)
    return TorchEngine(runner, tokenizer, LIMITS)


def asked(tokenizer: Tokenizer, ref: int, question: str, fields: dict[str, Any], **changes: Any) -> Sequence:
    body = Body(sampling=Sampling(seed=0), messages=({"role": "user", "content": question},), **fields)
    shape = shape_of(body)
    assert shape is not None
    prompt = tokenizer.encode_chat(body.messages, body.tools)
    return make_sequence(ref, prompt, **{"max_tokens": 100, "grammar": shape[0], **changes})


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_a_strict_schema_holds_for_every_seed(
    engine: TorchEngine, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    told = run(
        engine,
        *(
            asked(tokenizer, ref, "Make up a person, as JSON.", form(schema), temperature=0.4 * (ref % 4))
            for ref in range(8)
        ),
    )
    whole = [answer for answer in told.values() if answer.end == "stop"]
    assert len(whole) >= len(told) // 2
    for answer in whole:
        jsonschema.validate(json.loads(answer.text), schema)
    assert all(answer.end in ("stop", "length") for answer in told.values()), "a number may have digits for ever"


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_resume_at_every_token_of_json_gives_the_same_bytes(
    engine: TorchEngine, tokenizer: Tokenizer, temperature: float
) -> None:
    sequence = asked(tokenizer, 3, "Make up a person, as JSON.", form(PERSON), temperature=temperature)
    whole = run(engine, sequence)[3, 0]
    resumed = [
        msgspec.structs.replace(restored_at(sequence, whole, cut), key=Key(0, 1, Ref(cut)))
        for cut in range(len(whole.ids))
    ]
    told = run(engine, *resumed)
    for cut in range(len(whole.ids)):
        assert whole.ids[:cut] + told[cut, 0].ids == whole.ids
        assert tokenizer.render_text(whole.ids[:cut]) + told[cut, 0].text == whole.text
        assert told[cut, 0].end == whole.end


def test_a_forced_call_is_made_and_its_arguments_fit(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    fields = {"tools": (WEATHER, ADD), "tool_choice": "required"}
    told = run(engine, asked(tokenizer, 1, "What is 3 plus 4? Use add.", fields, temperature=0.0))[1, 0]
    assert told.end == "tool_calls"
    reader = CallReader(must=True)
    pieces = [piece for character in told.text for piece in reader.feed(character)]
    assert not any(isinstance(piece, Text) for piece in pieces)
    calls = [piece for piece in pieces if isinstance(piece, Begun)]
    assert calls[0].name == "add"
    written = "".join(piece.text for piece in pieces if isinstance(piece, Arguments) and piece.index == 0)
    jsonschema.validate(json.loads(written), ADD["function"]["parameters"])  # type: ignore[index]


def test_a_call_that_is_cut_is_a_length_and_shows_no_markup(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    fields = {"tools": (WEATHER,), "tool_choice": "required"}
    told = run(engine, asked(tokenizer, 1, "Say hi.", fields, max_tokens=16))[1, 0]
    assert told.end == "length"
    reader = CallReader(must=True)
    assert [*reader.feed(told.text), *reader.finish("length")] == []


def test_any_json_object_closes_or_is_a_length(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    fields = {"response_format": {"type": "json_object"}}
    told = run(
        engine,
        *(asked(tokenizer, ref, "A short JSON object.", fields, temperature=0.5 * (ref % 3)) for ref in range(6)),
    )
    for answer in told.values():
        assert answer.end in ("stop", "length")
        assert "  " not in answer.text.replace("\\", "").split('"')[0], "blanks are bounded"
        if answer.end == "stop":
            assert isinstance(json.loads(answer.text), dict)


def test_a_bound_answer_beside_free_ones_changes_none_of_them(engine: TorchEngine, tokenizer: Tokenizer) -> None:
    free = [
        make_sequence(ref, tokenizer.encode_chat([{"role": "user", "content": "Hi!"}]), max_tokens=20) for ref in (5, 6)
    ]
    bound = asked(tokenizer, 7, "A person, as JSON.", form(PERSON), max_tokens=40)
    together = run(engine, *free, bound)
    for sequence in (*free, bound):
        assert run(engine, sequence)[sequence.key.ref, 0] == together[sequence.key.ref, 0]


def test_tokens_spell_what_the_text_shows(tokenizer: Tokenizer) -> None:
    for text in ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "안녕 🌾  x"):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_written(text))).decode() == text


def test_a_pattern_made_to_be_slow_is_refused(tokenizer: Tokenizer) -> None:
    shape = shape_of(Body(sampling=Sampling(seed=0), **form({"type": "string", "pattern": "^(a{1000}){1000}$"})))
    assert shape is not None
    with pytest.raises(Uncompilable, match="too many expressions"):
        tokenizer.grammars.start(shape[0])
