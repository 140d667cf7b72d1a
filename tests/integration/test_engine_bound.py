"""Answers bound to a form, in every engine: valid or cut, the same alone, in a crowd and after any resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from engine_world import LIMITS, Told, make_sequence, restored_at, run, write_model

from ingress.calls import Arguments, Begun, CallReader
from wire.messages import Body, Sampling
from workers.engine.protocol import Engine, Grammar, Sequence
from workers.engine.runner import load_runner
from workers.engine.shape import shape_of
from workers.engine.simulated import Pace, SimulatedEngine
from workers.engine.simulated_vocabulary import SimulatedVocabulary
from workers.engine.tokenizer import Tokenizer
from workers.engine.torch_engine import TorchEngine
from workers.engine.vocabulary import Vocabulary

ROOMY = replace(LIMITS, context_tokens=400, kv_tokens=4 * 400)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"type": "string", "maxLength": 6}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": SCHEMA}} for name in ("f", "g")
)
JSON: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
}
MUST: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
AUTO: dict[str, Any] = {"tools": TOOLS, "tool_choice": "auto"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["simulated", "torch"])
def vocabulary(request: pytest.FixtureRequest, model_dir: Path) -> Vocabulary:
    return SimulatedVocabulary() if request.param == "simulated" else Tokenizer.load(model_dir)


@pytest.fixture
def make(vocabulary: Vocabulary, model_dir: Path) -> Callable[[], Engine]:
    """A fresh engine, as after a restart."""

    def made() -> Engine:
        if isinstance(vocabulary, SimulatedVocabulary):
            return SimulatedEngine(ROOMY, Pace(ttft_ms=0, tbt_ms=0))
        runner = load_runner(model_dir, slots=ROOMY.slots, context_tokens=ROOMY.context_tokens, threads=1)
        return TorchEngine(runner, vocabulary, ROOMY)

    return made


def bound(ref: int, asked: dict[str, Any], **changes: Any) -> Sequence:
    shape = shape_of(Body(sampling=Sampling(seed=0), **asked))
    assert shape is not None
    return make_sequence(ref, max_tokens=changes.pop("max_tokens", 300), grammar=shape[0], **changes)


def check(told: Told, asked: dict[str, Any]) -> None:
    """A whole answer is valid; one that was cut begins like one."""
    if asked is JSON:
        assert told.end in ("stop", "length")
        if told.end == "stop":
            jsonschema.validate(json.loads(told.text), SCHEMA)
        return
    reader = CallReader(must=asked is MUST)
    pieces = reader.feed(told.text)
    calls = [piece for piece in pieces if isinstance(piece, Begun)]
    assert told.end in ("tool_calls", "length") if asked is MUST else ("stop", "tool_calls", "length")
    assert (told.end == "tool_calls") <= bool(calls)
    for call in calls if told.end == "tool_calls" else calls[:-1]:
        written = "".join(p.text for p in pieces if isinstance(p, Arguments) and p.index == call.index)
        jsonschema.validate(json.loads(written), SCHEMA)


@pytest.mark.parametrize("asked", [JSON, MUST, AUTO], ids=["json", "required", "auto"])
def test_every_answer_is_valid_or_cut(make: Callable[[], Engine], asked: dict[str, Any]) -> None:
    sequences = [bound(ref, asked, temperature=0.5 * (ref % 4)) for ref in range(8)]
    told = run(make(), *sequences)
    for answer in told.values():
        check(answer, asked)
    if asked is not AUTO:
        assert any(answer.end in ("stop", "tool_calls") for answer in told.values())
    for sequence in sequences[::3]:
        assert run(make(), sequence)[sequence.key.ref, 0] == told[sequence.key.ref, 0]


@pytest.mark.parametrize("asked", [JSON, MUST, AUTO], ids=["json", "required", "auto"])
def test_a_resume_at_any_token_gives_the_same_bytes(
    make: Callable[[], Engine], vocabulary: Vocabulary, asked: dict[str, Any]
) -> None:
    sequence = bound(5, asked, max_tokens=60, stop=('"', "n"))
    whole = run(make(), sequence)[5, 0]
    calls = asked is not JSON
    for cut in range(len(whole.ids)):
        told = run(make(), restored_at(sequence, whole, cut))[5, 0]
        assert whole.ids[:cut] + told.ids == whole.ids
        assert vocabulary.render_text(whole.ids[:cut], sequence.stop, calls=calls) + told.text == whole.text
        assert told.end == whole.end
    assert vocabulary.render_text(whole.ids, sequence.stop, whole.end, calls=calls) == whole.text


def test_an_ending_before_the_answer_is_complete_is_a_length(make: Callable[[], Engine]) -> None:
    for asked in (JSON, MUST):
        assert run(make(), bound(1, asked, max_tokens=4))[1, 0].end == "length"


def test_the_grammars_end_is_the_end_whatever_else_was_asked(make: Callable[[], Engine]) -> None:
    once = {**MUST, "parallel_tool_calls": False}
    for asked, end in ((JSON, "stop"), (once, "tool_calls")):
        plain = run(make(), bound(3, asked))[3, 0]
        assert plain.end == end
        on = run(make(), bound(3, asked, ignore_eos=True, min_tokens=250))[3, 0]
        assert on.end == end
        exact = run(make(), bound(3, asked, max_tokens=len(plain.ids)))[3, 0]
        assert (exact.ids, exact.end) == (plain.ids, end), "complete with the last token allowed is no length"


def test_choices_have_their_own_place_in_the_grammar(make: Callable[[], Engine]) -> None:
    sequence = bound(2, JSON, n=3)
    told = run(make(), sequence)
    for answer in told.values():
        check(answer, JSON)
    assert run(make(), msgspec.structs.replace(sequence, n=1))[2, 0] == told[2, 0]


def test_logprobs_are_the_models_own(make: Callable[[], Engine]) -> None:
    told = run(make(), bound(2, JSON, logprobs=2))[2, 0]
    assert len(told.logprobs) == len(told.ids)
    assert told.ids == run(make(), bound(2, JSON))[2, 0].ids


def test_a_stop_string_ends_json_but_no_call(make: Callable[[], Engine]) -> None:
    assert run(make(), bound(4, JSON, stop=('"s"',)))[4, 0].text.count('"') == 2
    assert run(make(), bound(4, MUST, stop=("arguments", "<", '"')))[4, 0].end in ("tool_calls", "length")


def test_one_bad_grammar_fails_alone(make: Callable[[], Engine]) -> None:
    good, bad = bound(1, JSON), make_sequence(2, grammar=Grammar("start: %json {"), max_tokens=5)
    lost = restored_at(bound(3, JSON), Told(ids=[40, 41, 42]), 3)
    engine = make()
    for sequence in (good, bad, lost):
        engine.add(sequence)
    ends: dict[int, list[object]] = {}
    while engine.busy():
        for emission in engine.step():
            if emission.end or emission.error:
                ends.setdefault(emission.key.ref, []).append(emission.end or "failed")
    assert ends == {1: ["stop"], 2: ["failed"], 3: ["failed"]}
    assert engine.load().running == 0
