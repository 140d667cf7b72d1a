"""The forward pass of a Llama-family decoder over a batch of rows, in terms of a device's kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from workers.engine.gpu.kernels import Batch, Cache, Kernels, Turn
from workers.engine.gpu.pages import PAGE_TOKENS
from workers.engine.gpu.ranks import Ranks
from workers.engine.gpu.weights import Weights


class Model:
    """A rank's part of the weights, and its part of the cache."""

    def __init__(self, weights: Weights, kernels: Kernels, ranks: Ranks, *, pages: int, context_tokens: int) -> None:
        self._weights = weights
        self._kernels = kernels
        self._ranks = ranks
        self._split = ranks.size > 1
        device, heads = weights.shard.device, weights.layers[0].heads
        self._cache = torch.empty(
            (weights.architecture.layers, 2, pages, PAGE_TOKENS, heads.keys, heads.size),
            dtype=kernels.dtype,
            device=device,
        )
        self._caches = [Cache(keys=layer[0], values=layer[1]) for layer in self._cache]
        self._turn = _turn(weights.architecture.inverse_frequencies, context_tokens, device)

    def rows(self, batch: Batch) -> torch.Tensor:
        """Write the batch's keys and values, and give its rows as the head wants them."""
        kernels, weights, epsilon = self._kernels, self._weights, self._weights.architecture.norm_epsilon
        residual = F.embedding(batch.ids, weights.embedding).float()
        delta: torch.Tensor | None = None
        for layer, cache in zip(weights.layers, self._caches, strict=True):
            mixed = kernels.linear(kernels.norm(residual, delta, layer.attention_norm, epsilon), layer.qkv)
            queries = kernels.place(mixed, layer.heads, self._turn, cache, batch)
            seen = kernels.attend(queries, cache, batch).flatten(1)
            delta = self._ranks.total(kernels.linear(seen, layer.output, wide=self._split))
            wide = kernels.linear(kernels.norm(residual, delta, layer.mlp_norm, epsilon), layer.gate_up)
            delta = self._ranks.total(kernels.linear(kernels.gate(wide), layer.down, wide=self._split))
        return kernels.norm(residual, delta, weights.final_norm, epsilon)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] float32."""
        mine = self._kernels.linear(rows, self._weights.head, wide=True)
        return self._ranks.joined(mine)[:, : self._weights.architecture.vocab_size]

    def copy_page(self, source: int, target: int) -> None:
        """Give a page what another has, in every layer."""
        self._cache[:, :, target] = self._cache[:, :, source]


def page_bytes(weights: Weights, kernels: Kernels) -> int:
    """Of a page of this rank's cache, all layers together."""
    heads = weights.layers[0].heads
    elements = weights.architecture.layers * 2 * PAGE_TOKENS * heads.keys * heads.size
    return elements * torch.finfo(kernels.dtype).bits // 8


def _turn(inverse_frequencies: tuple[float, ...], context_tokens: int, device: torch.device) -> Turn:
    steps = torch.arange(context_tokens, dtype=torch.float64)
    angles = steps[:, None] * torch.tensor(inverse_frequencies, dtype=torch.float64)
    return Turn(cos=angles.cos().float().to(device), sin=angles.sin().float().to(device))
