"""One rank's part of a model's weights, fused, on its device.

Attention heads and the inner dimension of the MLP are cut among the ranks, and the vocabulary of the head: the first
layer of each pair by outputs, the second by inputs, so that between the two nothing has to be exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.engine.architecture import Architecture
from workers.engine.errors import ModelUnusable
from workers.engine.gpu.kernels import Heads, Matrix
from workers.engine.gpu.source import Source

_LARGEST = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of a model a rank has, and how."""

    rank: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    """of activations, and of weights that aren't int8"""
    int8: bool
    """the decoder layers' matrices as int8 with one scale a row; embedding and head stay as they are"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer."""

    attention_norm: torch.Tensor
    qkv: Matrix
    heads: Heads
    output: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A rank's part of a model."""

    architecture: Architecture
    shard: Shard
    digest: str
    embedding: torch.Tensor
    """[vocab, hidden], whole on every rank"""
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: Matrix
    """[a rank's part of the vocabulary, rounded up with rows of zeros; hidden]"""


def load(architecture: Architecture, source: Source, shard: Shard) -> Weights:
    """Read a rank's part, a layer at a time. ModelUnusable, also when the ranks can't share the model evenly."""
    check_even(architecture, shard.ranks)
    reader = _Reader(architecture, source, shard)
    embedding = reader.rows("model.embed_tokens.weight", architecture.vocab_size)
    return Weights(
        architecture=architecture,
        shard=shard,
        digest=source.digest,
        embedding=embedding,
        layers=tuple(reader.layer(index) for index in range(architecture.layers)),
        final_norm=reader.norm("model.norm.weight", architecture.hidden),
        head=reader.head(embedding),
    )


def check_even(architecture: Architecture, ranks: int) -> None:
    """ModelUnusable when so many ranks can't share the model evenly."""
    for what, count in (("key heads", architecture.kv_heads), ("inner dimensions", architecture.intermediate)):
        if count % ranks:
            raise ModelUnusable(f"{ranks} ranks can't share the model's {count} {what} evenly; use a divisor of both")


def quantised(weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
    """Whole numbers from −127 to 127 and one scale a row: exact in bf16, so that only the scale rounds again."""
    wide = weight.float()
    scale = wide.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
    return Matrix(values=(wide / scale[:, None]).round().to(torch.int8), scale=scale, bias=bias)


def _own(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A copy where the allocator puts it: how a file's mapping is aligned can change a library's last bit."""
    return tensor.to(device, dtype, copy=True, memory_format=torch.contiguous_format)


class _Reader:
    """Reads what a rank needs."""

    def __init__(self, architecture: Architecture, source: Source, shard: Shard) -> None:
        self._architecture = architecture
        self._source = source
        self._shard = shard

    def layer(self, index: int) -> Layer:
        shape, prefix = self._architecture, f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        query, shared = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        return Layer(
            attention_norm=self.norm(prefix + "input_layernorm.weight", shape.hidden),
            qkv=self._by_outputs(
                [(attention + "q_proj", query), (attention + "k_proj", shared), (attention + "v_proj", shared)]
            ),
            heads=self._heads(attention),
            output=self._by_inputs(attention + "o_proj", query),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight", shape.hidden),
            gate_up=self._by_outputs([(mlp + "gate_proj", shape.intermediate), (mlp + "up_proj", shape.intermediate)]),
            down=self._by_inputs(mlp + "down_proj", shape.intermediate),
        )

    def norm(self, name: str, size: int) -> torch.Tensor:
        return _own(self._source.read(name, 0, 0, size), self._shard.device, torch.float32)

    def rows(self, name: str, count: int) -> torch.Tensor:
        return _own(self._source.read(name, 0, 0, count), self._shard.device, self._shard.dtype)

    def head(self, embedding: torch.Tensor) -> Matrix:
        """This rank's rows; of the embedding, where the model ties the two."""
        shard, vocab = self._shard, self._architecture.vocab_size
        each = -(-vocab // shard.ranks)
        begin, end = min(vocab, shard.rank * each), min(vocab, (shard.rank + 1) * each)
        if self._source.has("lm_head.weight"):
            mine = _own(self._source.read("lm_head.weight", 0, begin, end), shard.device, shard.dtype)
        else:
            mine = embedding[begin:end]
        if end - begin < each:
            mine = torch.nn.functional.pad(mine, (0, 0, 0, each - (end - begin)))
        return Matrix(values=mine)

    def _heads(self, attention: str) -> Heads:
        shape, ranks = self._architecture, self._shard.ranks
        norms = [
            self.norm(name, shape.head_size) if self._source.has(name := f"{attention}{side}_norm.weight") else None
            for side in ("q", "k")
        ]
        return Heads(
            queries=shape.heads // ranks,
            keys=shape.kv_heads // ranks,
            size=shape.head_size,
            epsilon=shape.norm_epsilon,
            query_norm=norms[0],
            key_norm=norms[1],
        )

    def _by_outputs(self, parts: Sequence[tuple[str, int]]) -> Matrix:
        """Several layers over the same input, as one: this rank's outputs of each, with all inputs."""
        weights, biases = [], []
        for name, outputs in parts:
            begin, end = self._mine(outputs)
            weights.append(self._source.read(f"{name}.weight", 0, begin, end))
            if self._source.has(f"{name}.bias"):
                biases.append(self._source.read(f"{name}.bias", 0, begin, end))
        return self._matrix(torch.cat(weights), torch.cat(biases) if biases else None)

    def _by_inputs(self, name: str, inputs: int) -> Matrix:
        """All outputs, over this rank's inputs; the first rank adds the bias."""
        weight = self._source.read(f"{name}.weight", 1, *self._mine(inputs))
        biased = self._shard.rank == 0 and self._source.has(f"{name}.bias")
        return self._matrix(
            weight, self._source.read(f"{name}.bias", 0, 0, self._architecture.hidden) if biased else None
        )

    def _mine(self, count: int) -> tuple[int, int]:
        each = count // self._shard.ranks
        return self._shard.rank * each, (self._shard.rank + 1) * each

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matrix:
        device = self._shard.device
        bias = None if bias is None else bias.to(device, torch.float32)
        if self._shard.int8:
            return quantised(weight.to(device), bias)
        return Matrix(values=_own(weight, device, self._shard.dtype), bias=bias)
