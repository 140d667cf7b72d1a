"""`millstream model`: models of one's own, from Hugging Face directories and GGUF files, whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_world import make_sequence, run, write_model
from gguf_file import write_gguf

from millstream import added
from millstream.model import ModelFailed
from millstream.up import cache_dir
from workers.engine.link import Config
from workers.engine.make import make_engine, make_vocabulary

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def said() -> list[str]:
    return []


def kept(cache: Path) -> list[str]:
    """What lies in the cache, but for its lock."""
    return sorted(path.name for path in (cache / "models").glob("*") if path.name != ".lock")


def answer(directory: Path, context_tokens: int) -> str:
    """Some text of the model, by the engine that a worker makes."""
    config = Config(
        kind="torch",
        slots=2,
        threads=1,
        context_tokens=context_tokens,
        prefix_tokens=0,
        model_dir=str(directory),
        simulated_ttft_ms=0,
        simulated_tbt_ms=0,
        log_level="warning",
        numerics="throughput",
    )
    vocabulary = make_vocabulary(config)
    prompt = vocabulary.encode_chat([{"role": "user", "content": "Hello"}])
    told = run(make_engine(config, vocabulary), make_sequence(1, prompt, 12, temperature=0.0, ignore_eos=True))
    assert len(told[1, 0].ids) == 12
    return told[1, 0].text


@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen2", "tie_word_embeddings": False, "architectures": ["Qwen2ForCausalLM"]}],
    ids=["llama", "qwen2"],
)
def test_a_directory_is_added_listed_served_and_removed(
    tmp_path: Path, cache: Path, said: list[str], changes: dict[str, object]
) -> None:
    source = write_model(tmp_path / "Tiny-Model", **changes)
    made = added.add(cache, source, None, said.append)
    assert (made.name, made.context_tokens, made.source) == ("Tiny-Model", 512, str(source))
    assert any("preparing" in line for line in said)
    assert added.every(cache) == [made]
    served = added.served_of(cache, "Tiny-Model")
    assert served.directory is not None
    assert (served.name, served.engine_kind, served.context_tokens) == ("Tiny-Model", "torch", 512)
    assert answer(served.directory, served.context_tokens) == answer(source, 512)
    added.remove(cache, "Tiny-Model")
    assert added.every(cache) == []
    assert kept(cache) == []
    assert (source / "config.json").is_file()


def test_a_gguf_file_is_added(tmp_path: Path, cache: Path, said: list[str]) -> None:
    source = write_gguf(tmp_path / "tiny.q.gguf", tmp_path / "scratch")
    made = added.add(cache, source, "me/tiny", said.append)
    assert added.served_of(cache, "me/tiny").name == "me/tiny"
    directory = added.served_of(cache, "me/tiny").directory
    assert directory is not None
    assert answer(directory, made.context_tokens)
    assert json.loads((directory / "config.json").read_text())["num_hidden_layers"] == 2


def test_a_name_is_taken_once(tmp_path: Path, cache: Path, said: list[str]) -> None:
    source = write_model(tmp_path / "tiny")
    added.add(cache, source, None, said.append)
    with pytest.raises(ModelFailed, match="there is a model 'tiny'"):
        added.add(cache, source, None, said.append)
    with pytest.raises(ModelFailed, match="differs in nothing but case"):
        added.add(cache, source, "TINY", said.append)
    assert added.add(cache, source, "tiny-2", said.append).name == "tiny-2"


@pytest.mark.parametrize(
    "name", ["", "a b", "../x", "a..b", "a//b", "/a", "a/", "ä", "x" * 97, "smollm2-135m-instruct"]
)
def test_a_name_that_cannot_be_one_is_refused_at_once(tmp_path: Path, cache: Path, said: list[str], name: str) -> None:
    source = tmp_path / name if name == "a b" else tmp_path / "source"
    source.mkdir()
    with pytest.raises(ModelFailed, match="name"):
        added.add(cache, source, name or "-", said.append)
    assert said == []


def broken_config(source: Path) -> None:
    (source / "config.json").write_text("{")


def another_family(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))


def no_template(source: Path) -> None:
    (source / "chat_template.jinja").unlink()


def broken_template(source: Path) -> None:
    (source / "chat_template.jinja").write_text("{% for %}")


def no_tokenizer(source: Path) -> None:
    (source / "tokenizer.json").unlink()


def no_weights(source: Path) -> None:
    (source / "model.safetensors").unlink()


def cut_weights(source: Path) -> None:
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def a_layer_too_few(source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


def weights_elsewhere(source: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../../secret.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def numbers_that_are_none(source: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], torch.nan)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (broken_config, "config.json"),
        (another_family, "a model of type 'mamba' can't be run here; use one of llama, qwen2"),
        (no_template, "has no chat template"),
        (broken_template, "chat template can't be read"),
        (no_tokenizer, "has no tokenizer.json"),
        (no_weights, "has no model.safetensors"),
        (cut_weights, "model.safetensors"),
        (a_layer_too_few, "has no tensor 'model.layers.2"),
        (weights_elsewhere, "secret.safetensors"),
        (numbers_that_are_none, "no usable numbers"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_run_is_refused_with_a_sentence_and_nothing_is_left(
    tmp_path: Path, cache: Path, said: list[str], harm: object, why: str
) -> None:
    source = write_model(tmp_path / "tiny")
    harm(source)  # type: ignore[operator]
    with pytest.raises(ModelFailed) as failed:
        added.add(cache, source, None, said.append)
    assert why in str(failed.value)
    assert "making" not in str(failed.value)
    assert kept(cache) == []


def test_files_that_are_no_model_are_refused(tmp_path: Path, cache: Path, said: list[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelFailed, match="not a GGUF file"):
        added.add(cache, tmp_path / "notes.txt", "notes", said.append)
    with pytest.raises(ModelFailed, match="isn't there"):
        added.add(cache, tmp_path / "nothing", None, said.append)
    other = write_gguf(tmp_path / "other.gguf", tmp_path / "scratch", architecture="gemma")
    with pytest.raises(ModelFailed, match="type 'gemma' can't be run here"):
        added.add(cache, other, None, said.append)
    assert kept(cache) == []


def test_a_gguf_without_a_template_is_refused(tmp_path: Path, cache: Path, said: list[str]) -> None:
    source = write_gguf(tmp_path / "base.gguf", tmp_path / "scratch", template=None)
    with pytest.raises(ModelFailed, match="has no chat template"):
        added.add(cache, source, None, said.append)
    assert kept(cache) == []


def test_the_command_says_what_it_did_and_what_is_wrong(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert cache_dir(environ) == tmp_path / "cache" / "millstream"

    def millstream(*argv: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "millstream", *argv)
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)

    assert "no models were added" in millstream("model", "list").stdout
    done = millstream("model", "add", str(tmp_path / "tiny"), "--name", "mine")
    assert (done.returncode, done.stdout) == (0, "added mine; serve it with `millstream up --model mine`\n")
    assert "mine" in millstream("model", "list").stdout
    assert json.loads(millstream("model", "list", "--json").stdout)[0]["name"] == "mine"
    assert millstream("model", "remove", "mine").stdout == "removed mine\n"
    for argv in (("model", "remove", "mine"), ("up", "--model", "mine", "--state", str(tmp_path / "state"))):
        failed = millstream(*argv)
        assert failed.returncode != 0
        assert failed.stderr.startswith("millstream: no model 'mine' was added")
        assert "Traceback" not in failed.stderr
