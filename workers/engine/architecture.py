"""The shape of a Llama-family model, from its config.json. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.engine.errors import ModelUnusable

FAMILY = ("llama", "qwen2", "qwen3")
"""types of models, by the name that their config.json and GGUF files have for them"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What the runner needs to know."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab_size: int
    context_tokens: int
    """the longest sequence the model was made for"""
    norm_epsilon: float
    inverse_frequencies: tuple[float, ...]
    """radians a position, one for each pair of a head's dimensions (rotary embedding)"""

    @classmethod
    def read(cls, model_dir: Path) -> Architecture:
        """ModelUnusable for a model of another family, or one whose config can't be read."""
        path = model_dir / "config.json"
        try:
            config = json.loads(path.read_bytes())
            return _architecture(config)
        except (OSError, ValueError) as exc:
            raise ModelUnusable(f"{path} is missing or broken; `millstream up` makes the directory again") from exc
        except KeyError as exc:
            raise ModelUnusable(f"{path} lacks {exc}") from exc


def _architecture(config: Mapping[str, Any]) -> Architecture:
    family = config["model_type"]
    if family not in FAMILY:
        raise ModelUnusable(f"a model of type {family!r} can't be run here; use one of {', '.join(FAMILY)}")
    _check_parts(config)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_size = config.get("head_dim") or hidden // heads
    return Architecture(
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=head_size,
        intermediate=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        context_tokens=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        inverse_frequencies=_frequencies(config, head_size),
    )


def _check_parts(config: Mapping[str, Any]) -> None:
    """ModelUnusable for what members of these families may have and no runner here computes."""
    unusual = {
        "a sliding window": config.get("use_sliding_window")
        or "sliding_attention" in (config.get("layer_types") or ()),
        "biases in its MLP": config.get("mlp_bias"),
        f"the activation {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "rotary embeddings of a part of a head": (config.get("partial_rotary_factor") or 1.0) != 1.0,
    }
    for part, there in unusual.items():
        if there:
            raise ModelUnusable(f"a model with {part} can't be run here")


def _frequencies(config: Mapping[str, Any], head_size: int) -> tuple[float, ...]:
    """Rotary frequencies, plain or stretched as Llama 3.1 does it; older configs keep them at the top level."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    plain = [theta ** -(2 * index / head_size) for index in range(head_size // 2)]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return tuple(plain)
    if kind == "llama3":
        return tuple(_stretched(frequency, rope) for frequency in plain)
    raise ModelUnusable(f"rotary embeddings of type {kind!r} can't be run here")


def _stretched(frequency: float, rope: Mapping[str, Any]) -> float:
    """Llama 3.1: low frequencies by `factor`, high ones not at all, those between in proportion."""
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float(frequency * (kept + (1 - kept) / rope["factor"]))
