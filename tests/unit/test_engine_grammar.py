"""Grammars over real tokens: whatever is drawn, what comes out is what the schema says."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from engine_world import write_model
from test_engine_shape import CITY, PAIR, form, tool

from ingress.calls import Arguments, Begun, CallReader
from wire.calls import OPENING
from wire.messages import Body, Sampling
from workers.engine.errors import SamplingFailed
from workers.engine.grammar import KEPT, Grammars, Matcher, Vocab
from workers.engine.protocol import Grammar
from workers.engine.shape import shape_of
from workers.engine.simulated_vocabulary import SimulatedVocabulary
from workers.engine.tokenizer import Tokenizer
from workers.engine.vocabulary import Vocabulary

ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string", "maxLength": 12}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
    "required": ["street", "zip"],
    "additionalProperties": False,
}
LEAF = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}},
    "required": ["next"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    ADDRESS,
    {"type": "array", "items": ADDRESS, "minItems": 1, "maxItems": 2},
    {"enum": ["red", "green", 3, None]},
    {"type": "integer", "minimum": -5, "maximum": 99},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date"}, "n": {"type": ["integer", "null"]}},
     "required": ["when", "n"], "additionalProperties": False},
    {"$defs": {"leaf": LEAF}, "$ref": "#/$defs/leaf"},
    {"anyOf": [{"type": "boolean"}, {"const": "안녕 🌾"}]},
]  # fmt: skip


@pytest.fixture(scope="module", params=["real", "simulated"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    if request.param == "simulated":
        return SimulatedVocabulary()
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("model")))


def grammar_of(**fields: Any) -> Grammar:
    shape = shape_of(Body(sampling=Sampling(seed=0), **fields))
    assert shape is not None
    return shape[0]


def tokens(mask: bytes, vocabulary: Vocabulary) -> list[int]:
    return [token for token in range(vocabulary.vocab_size) if mask[token // 8] >> token % 8 & 1]


def walk(matcher: Matcher, vocabulary: Vocabulary, seed: int, longest: int = 3_000) -> list[int]:
    """Tokens drawn from those allowed, the last of a choice rather early."""
    dice, ids = random.Random(seed), list[int]()
    while not matcher.ended and len(ids) < longest:
        mask = matcher.allowed()
        assert mask is not None
        allowed = tokens(mask, vocabulary)
        ends = vocabulary.eos_ids & set(allowed)
        inner = [token for token in allowed if token not in vocabulary.eos_ids]
        assert all(vocabulary.token_bytes(token) for token in inner), "no control token is ever allowed"
        if ends and (not inner or dice.random() < 0.5):
            return ids
        quote = [token for token in inner if vocabulary.token_bytes(token) in (b'"', b"}")]
        ids.append(quote[0] if quote and dice.random() < 0.3 else dice.choice(inner))
        matcher.take(ids[-1])
    assert matcher.ended
    return ids


def text_of(ids: list[int], vocabulary: Vocabulary) -> str:
    return b"".join(map(vocabulary.token_bytes, ids)).decode()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_any_draw_of_allowed_tokens_is_valid(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    grammar = grammar_of(response_format=form(schema, strict=True))
    for seed in range(8):
        text = text_of(walk(vocabulary.grammars.start(grammar), vocabulary, seed), vocabulary)
        jsonschema.validate(json.loads(text), schema)


def test_any_draw_of_allowed_tokens_is_calls(vocabulary: Vocabulary) -> None:
    tools = (tool("add", PAIR), tool("weather", {**CITY, "properties": {"city": {"type": "string", "maxLength": 9}}}))
    grammar = grammar_of(tools=tools, tool_choice="required")
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in tools}
    for seed in range(8):
        reader = CallReader(must=True)
        pieces = reader.feed(text_of(walk(vocabulary.grammars.start(grammar), vocabulary, seed), vocabulary))
        calls = [piece for piece in pieces if isinstance(piece, Begun)]
        assert calls
        for call in calls:
            written = "".join(p.text for p in pieces if isinstance(p, Arguments) and p.index == call.index)
            jsonschema.validate(json.loads(written), schemas[call.name])


def test_a_choice_that_is_taken_up_again_stands_where_it_stood(vocabulary: Vocabulary) -> None:
    grammar = grammar_of(response_format=form(ADDRESS))
    ids = walk(vocabulary.grammars.start(grammar), vocabulary, 1)
    for cut in range(len(ids)):
        before, after = vocabulary.grammars.start(grammar), vocabulary.grammars.start(grammar)
        for token in ids[:cut]:
            before.allowed()
            before.take(token)
            after.take(token)
        assert before.allowed() == after.allowed()


def test_what_is_not_allowed_shows_at_the_next_token(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.grammars.start(grammar_of(response_format=form(ADDRESS)))
    (wrong,) = vocabulary.encode_written("}")
    matcher.take(wrong)
    assert not matcher.ended
    with pytest.raises(SamplingFailed):
        matcher.allowed()


def test_before_a_call_anything_goes_but_what_would_evade_the_grammar() -> None:
    pieces = [b"", b"<", b"tool", b"_call", b">", b">!", b"<tool_call>", b" <tool_call>", b"<tool_call>!", b"{", b"\n"]
    vocab = Vocab(
        [*pieces, *(bytes([byte]) for byte in range(256))], [0], 0, lambda text: [11 + byte for byte in text.encode()]
    )
    grammars = Grammars(vocab, frozenset([0]))
    lazy = grammar_of(tools=(tool("f"),))
    assert lazy.lazy

    def after(*ids: int) -> Matcher:
        matcher = grammars.start(lazy)
        for token in ids:
            matcher.take(token)
        return matcher

    def allows(matcher: Matcher, token: int) -> bool:
        mask = matcher.allowed()
        return mask is None or bool(mask[token // 8] >> token % 8 & 1)

    assert not allows(after(), 8), "a token that goes on past the marker"
    assert allows(after(), 6)
    assert allows(after(), 7)
    assert allows(after(1, 2), 5)
    assert not allows(after(1, 2, 3), 5)
    assert allows(after(1, 2, 3), 4)
    assert allows(after(1, 1, 2, 3), 0), "the text may end here"
    for begun in (after(1, 2, 3, 4), after(6), after(7), after(1, 6)):
        assert allows(begun, 11 + ord("\n")), "a forced text has the one form that the tokenizer gives it"
        assert not allows(begun, 9)
        assert not begun.ended
    assert OPENING.encode() == pieces[6]


def test_what_was_compiled_is_kept_up_to_a_bound(vocabulary: Vocabulary) -> None:
    grammars = vocabulary.grammars
    texts = [f'start: "{number}"' for number in range(KEPT + 1)]
    first = grammars.compile(texts[0])
    assert grammars.compile(texts[0]) is first
    for text in texts[1:]:
        grammars.compile(text)
    assert grammars.compile(texts[0]) is not first
