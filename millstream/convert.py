"""`python -m millstream.convert SOURCE DIRECTORY`: a model that somebody published → a directory that the engine loads.

SOURCE is a GGUF file, or a directory as Hugging Face has it. A process of its own: it needs transformers and a
gigabyte of memory for half a minute, once. What it prints is progress; the last line on stderr says what is wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from wire.messages import Ref, Sampling
from workers.engine.architecture import FAMILY, Architecture
from workers.engine.errors import EngineError, ModelUnusable
from workers.engine.link import Config
from workers.engine.protocol import Key, Sequence
from workers.engine.tokenizer import Tokenizer
from workers.engine.weights import precompute

_ABOUT_THE_FILE = ("quantization_config", "_name_or_path")
_NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
_IF_THERE = ("generation_config.json", "chat_template.jinja", "model.safetensors.index.json")
_TRIAL_TOKENS = 8


def convert(source: Path, directory: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json with its chat template, and the engine's own weights.

    ModelUnusable when the source isn't a model that the engine can run; that is found out as early as possible.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        _from_directory(source, directory)
    else:
        _from_gguf(source, directory)
    Tokenizer.load(directory)
    print("preparing the weights for the engine", flush=True)
    precompute(directory)
    _try(directory)


# ---------------------------------------------------------------- Hugging Face


def _from_directory(source: Path, directory: Path) -> None:
    """Copy what the engine reads, so that the source may go; and nothing that could run."""
    weights = _weights(source)
    for name in _NEEDED:
        if not (source / name).is_file():
            raise ModelUnusable(f"{source} has no {name}; give a directory as `save_pretrained` writes it")
    Architecture.read(source)
    for name in (*_NEEDED, *_IF_THERE):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    Tokenizer.load(directory)
    for index, name in enumerate(weights, 1):
        print(f"copying the weights, file {index} of {len(weights)}", flush=True)
        shutil.copyfile(source / name, directory / name)


def _weights(source: Path) -> list[str]:
    """The names of the files of weights."""
    index = source / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as exc:
            raise ModelUnusable(f"{index} is broken") from exc
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (source / name).is_file():
            raise ModelUnusable(f"{source} has no {name}; the weights must be there as safetensors")
    return names


# ---------------------------------------------------------------- GGUF


def _from_gguf(gguf: Path, directory: Path) -> None:
    import torch
    import transformers

    fields = _gguf_fields(gguf, "general.architecture", "tokenizer.ggml.pre")
    if fields["general.architecture"] not in FAMILY:
        raise ModelUnusable(
            f"a model of type {fields['general.architecture']!r} can't be run here; use one of {', '.join(FAMILY)}"
        )
    print("reading the tokenizer", flush=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(directory)
    if fields["tokenizer.ggml.pre"] == "smollm":
        _split_digits(directory / "tokenizer.json")
    print("reading the weights", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dequantized(transformers)
    )
    _save(model, directory)


def _gguf_fields(gguf: Path, *names: str) -> dict[str, str | None]:
    """Texts in a GGUF file's header. ModelUnusable when it isn't one."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as exc:
        raise ModelUnusable(f"{gguf} is not a GGUF file, or not a whole one") from exc
    found = {name: reader.get_field(name) for name in names}
    return {name: None if field is None else field.contents() for name, field in found.items()}


def _split_digits(path: Path) -> None:
    """SmolLM's tokens never join digits with what is beside them; transformers loses that on the way from a GGUF.

    Without it two spaces before a digit become other tokens than the model was trained on.
    """
    described = json.loads(path.read_text())
    parts = [{"type": "Digits", "individual_digits": True}, described["pre_tokenizer"]]
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    path.write_text(json.dumps(described, ensure_ascii=False))


def _dequantized(transformers: Any) -> dict[str, Any]:
    """From 5.24 on transformers keeps GGUF weights packed unless told otherwise; before, it always unpacks them."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _save(model: Any, directory: Path) -> None:
    """Not by save_pretrained, which refuses what came from a GGUF. float16 is more than four-bit weights need."""
    import torch
    from safetensors.torch import save_file

    config = {name: value for name, value in model.config.to_dict().items() if name not in _ABOUT_THE_FILE}
    config["dtype"] = "float16"
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = model.state_dict()
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    tensors = {name: tensor.to(torch.float16).contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------- the trial


def _try(directory: Path) -> None:
    """Have the engine write a few tokens: ModelUnusable if its numbers are none."""
    from workers.engine.make import make_engine

    print("trying it", flush=True)
    vocabulary = Tokenizer.load(directory)
    prompt = vocabulary.encode_chat([{"role": "user", "content": "Hello!"}])
    room = Architecture.read(directory).context_tokens
    if len(prompt) + _TRIAL_TOKENS > room:
        raise ModelUnusable(f"its context of {room} tokens has no room for a question and an answer")
    config = Config(
        kind="torch",
        slots=1,
        threads=os.cpu_count() or 1,
        context_tokens=len(prompt) + _TRIAL_TOKENS,
        prefix_tokens=0,
        model_dir=str(directory),
        simulated_ttft_ms=0,
        simulated_tbt_ms=0,
        log_level="warning",
    )
    engine = make_engine(config, vocabulary)
    engine.add(
        Sequence(
            key=Key(0, 0, Ref(0)),
            prompt=prompt,
            max_tokens=_TRIAL_TOKENS,
            sampling=Sampling(seed=0, temperature=0.0),
            ignore_eos=True,
            logprobs=0,
        )
    )
    while engine.busy():
        for emission in engine.step():
            if emission.error is not None:
                raise ModelUnusable(f"it can't write: {emission.error}")


def main(source: Path, directory: Path) -> int:
    """Exit status 0, or 1 after a sentence that says what is wrong with the source."""
    try:
        convert(source, directory)
    except EngineError as exc:
        print(str(exc).replace(str(directory), str(source)), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
