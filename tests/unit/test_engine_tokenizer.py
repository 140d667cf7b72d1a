"""A real tokenizer's format: templates, control tokens that can't be forged, bytes that are exact."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from engine_world import CONTROL, write_model, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from wire.messages import Logprob
from workers.engine.errors import ModelUnusable, TemplateRefused
from workers.engine.simulated_vocabulary import SimulatedVocabulary
from workers.engine.template import Template
from workers.engine.tokenizer import Tokenizer
from workers.engine.vocabulary import Vocabulary

START, END = 1, 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(params=["real", "simulated"])
def vocabulary(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Vocabulary:
    return tokenizer if request.param == "real" else SimulatedVocabulary()


def plain(vocabulary: Vocabulary, ids: tuple[int, ...]) -> str:
    return b"".join(vocabulary.token_bytes(token) for token in ids).decode()


TEXTS = ["hello world", "안녕하세요 🌾👩‍👩‍👧", "", "  two\n\n lines ", "\x00\x7f", "<|im_end|>", "a" * 5000]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(vocabulary: Vocabulary, text: str) -> None:
    assert plain(vocabulary, vocabulary.encode_text(text)) == text


def test_a_lone_surrogate_does_no_harm(vocabulary: Vocabulary) -> None:
    assert plain(vocabulary, vocabulary.encode_text("a\ud800b")) == "a?b"
    assert vocabulary.encode_chat([{"role": "user", "content": "a\ud800b"}])


def test_a_chat_is_rendered_up_to_the_assistants_turn(tokenizer: Tokenizer) -> None:
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": " hello "}]
    assert tokenizer.render(messages) == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat(messages)
    assert [token for token in ids if token < len(CONTROL)] == [START, END, START, END, START]
    assert b"".join(map(tokenizer.token_label, ids)).decode() == tokenizer.render(messages)


@given(text=st.lists(st.sampled_from([*CONTROL, "<|im_", "end|>", " ", "\ue000", "x", "안"]), max_size=8).map("".join))
def test_a_message_cannot_forge_control_tokens(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert [token for token in ids if token < len(CONTROL)] == [START, END, START]
    inner = ids[ids.index(END, 1) - len(tokenizer.encode_plain("user\n" + text.strip())) : ids.index(END, 1)]
    assert plain(tokenizer, tuple(inner)) == "user\n" + text.strip()


def test_tools_cannot_forge_control_tokens_either(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat(
        [{"role": "user", "content": "x"}], [{"function": {"name": "<|im_start|>", "<|im_end|>": 1}}]
    )
    assert [token for token in ids if token < len(CONTROL)] == [START, END, START, END, START]
    assert '{"name": "<|im_start|>", "<|im_end|>": 1}' in plain(tokenizer, ids)


def test_a_null_content_is_no_word(tokenizer: Tokenizer) -> None:
    assert "None" not in tokenizer.render([{"role": "assistant", "content": None}])


def test_a_template_refuses_in_its_own_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateRefused, match="the system message must come first"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
    with pytest.raises(TemplateRefused, match="fails on them with TypeError"):
        Template("{{ messages[0].content + '!' }}", {}).render([{"role": "user", "content": ["parts"]}], ())
    with pytest.raises(TemplateRefused):
        SimulatedVocabulary().encode_chat([{"role": "pirate", "content": "x"}])


def test_control_tokens_add_no_text_but_have_a_label(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(END) == b""
    assert tokenizer.token_label(END) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


def test_the_end_is_what_the_model_says_not_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {END}  # tokenizer_config.json names <|im_start|>, as a conversion from GGUF does


def test_bytes_of_logprobs_are_exact_for_half_a_character(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode_text("안")[0]
    (shown,) = tokenizer.show_logprobs((half,), (Logprob(math.log(0.5), ((half, -0.5), (END, -1.5))),))
    assert shown.bytes == tuple("안".encode()[:1])
    assert shown.token == "\ufffd"
    assert [(other.token, other.logprob) for other in shown.top] == [("\ufffd", -0.5), ("<|im_end|>", -1.5)]


def test_rendered_text_is_what_was_released(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_text("one two")
    assert tokenizer.render_text(ids, ("two!",)) == "one "
    assert tokenizer.render_text(ids, ("two!",), "length") == "one two"
    assert tokenizer.render_text(ids, ("e t",), "stop") == "on"
    assert tokenizer.render_text(ids[:1]) == "o"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "missing"),
        ("tokenizer.json", "{", "broken"),
        ("tokenizer.json", '{"decoder": {"type": "Metaspace"}}', "byte-level"),
        ("chat_template.jinja", None, "no chat template"),
        ("chat_template.jinja", "{% if %}", "can't be read"),
        ("config.json", "{}", "eos_token_id"),
    ],
)
def test_a_broken_directory_is_named(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ModelUnusable, match=words):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_begins_texts_with_a_token_does_so_once(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 0]}')
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.encode_text("hello") == (1, *tokenizer.encode_plain("hello"))
    assert tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == (1, *tokenizer.encode_plain("hello"))
