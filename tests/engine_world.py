"""What the engine's tests share: a tiny model made on the spot, sequences, and a way to run an engine to its end."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from wire.messages import Ref, Sampling
from workers.engine.protocol import Emission, Engine, Key, Restored, Sequence
from workers.engine.scheduler import Limits

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LIMITS = Limits(slots=4, context_tokens=96, kv_tokens=4 * 96, chunk_tokens=16, step_tokens=16)


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: three control tokens, the bytes, and a few longer pieces."""
    spelled = _spelling()
    vocab = {name: index for index, name in enumerate(CONTROL)}
    for byte in range(256):
        vocab[spelled[byte]] = len(vocab)
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("ð", "Ł")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    described = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": name,
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
            for index, name in enumerate(CONTROL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [" ".join(pair) for pair in merges]},
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(described))
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def tiny_config(**changes: object) -> dict[str, object]:
    """The config.json of a model of 60,000 parameters."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "intermediate_size": 160,
        "vocab_size": 272,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        **changes,
    }


def write_model(directory: Path, seed: int = 0, **changes: object) -> Path:
    """A model directory with random weights and the tokenizer above."""
    import torch
    from safetensors.torch import save_file

    config = tiny_config(**changes)
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 1 + torch.rand(shape, generator=generator)
        if "norm" in name
        else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in _shapes(config).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _shapes(config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    sizes = {name: value for name, value in config.items() if isinstance(value, int)}
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, shared = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (sizes["vocab_size"], hidden)
    for index in range(sizes["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (query, hidden),
            f"{layer}self_attn.k_proj.weight": (shared, hidden),
            f"{layer}self_attn.v_proj.weight": (shared, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, query),
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}self_attn.{part}_norm.weight": (head,) for part in ("q", "k")}
        if config["model_type"] == "qwen2":
            shapes |= {
                f"{layer}self_attn.{part}_proj.bias": (size,)
                for part, size in (("q", query), ("k", shared), ("v", shared))
            }
    return shapes


def _spelling() -> list[str]:
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_sequence(
    ref: int = 0, prompt: Iterable[int] = (40, 50, 60), max_tokens: int = 8, **changes: object
) -> Sequence:
    """A sequence of shard 0, epoch 1; sampling fields may be given among the changes."""
    names = {field.name for field in msgspec.structs.fields(Sampling)}
    sampling = {"seed": ref, **{name: value for name, value in changes.items() if name in names}}
    others = {name: value for name, value in changes.items() if name not in names}
    fields = {
        "key": Key(0, 1, Ref(ref)),
        "prompt": tuple(prompt),
        "max_tokens": max_tokens,
        "sampling": Sampling(**sampling),
        **others,  # type: ignore[arg-type]
    }
    return Sequence(**fields)  # type: ignore[arg-type]


@dataclass
class Told:
    """What an engine said of one choice."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[object] = field(default_factory=list)
    end: str | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
        return self.end is not None or self.error is not None


class Transcript:
    """Collects emissions, and checks that each goes on where the last one stopped."""

    def __init__(self, restored: dict[tuple[int, int], int] | None = None) -> None:
        self.choices: defaultdict[tuple[int, int], Told] = defaultdict(Told)
        self._begun = restored or {}

    def take(self, emissions: Iterable[Emission]) -> None:
        for emission in emissions:
            at = (emission.key.ref, emission.choice)
            told = self.choices[at]
            assert not told.over, f"{at} goes on after its end"
            assert emission.error or emission.first == self._begun.get(at, 0) + len(told.ids)
            told.ids += emission.ids
            told.text += emission.text
            told.logprobs += emission.logprobs or ()
            told.end, told.error = emission.end, emission.error


def run(engine: Engine, *sequences: Sequence, steps: int = 10_000) -> dict[tuple[int, int], Told]:
    """Add the sequences, run until the engine has nothing to do; what it said, by (ref, choice)."""
    begun = {
        (sequence.key.ref, choice): len(restored.ids)
        for sequence in sequences
        for choice, restored in enumerate(sequence.restored)
    }
    transcript = Transcript(begun)
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(steps):
        if not engine.busy():
            return dict(transcript.choices)
        transcript.take(engine.step())
    raise AssertionError("the engine doesn't come to an end")


def restored_at(sequence: Sequence, told: Told, cut: int) -> Sequence:
    """The sequence as it is added after an engine died when choice 0 had `cut` tokens."""
    return msgspec.structs.replace(sequence, restored=(Restored(tuple(told.ids[:cut])),))
