"""The model's forward pass in plain torch, for machines where the native kernels can't be built.

Over all sequences at once, with results that no neighbour can change.

Linear layers are exact (see `exact`). What else crosses columns is done row by row (norms) or sequence by sequence
(attention), with shapes that depend on that row or sequence alone; the rest is plain IEEE arithmetic by element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from workers.engine.errors import ModelUnusable
from workers.engine.exact import multiplies_exactly
from workers.engine.forward import Runner
from workers.engine.numerics import EXACT
from workers.engine.plain_weights import Layer, Weights
from workers.engine.rotary import rotations
from workers.engine.scheduler import Work

_SERIAL_ELEMENTS = 32767
"""torch cuts larger element-wise work among threads, and computes the odd ends of the cuts by another code"""


class PlainRunner(Runner):
    """Linear layers by `exact`, attention sequence by sequence."""

    def __init__(self, weights: Weights, *, slots: int, context_tokens: int) -> None:
        shape = weights.architecture
        # not filled: a page costs memory only once it is used
        super().__init__(shape, torch.empty(shape.layers, 2, slots, shape.kv_heads, context_tokens, shape.head_size))
        self._weights = weights
        self._views = [[layer[side].unbind(0) for side in (0, 1)] for layer in self._kv]
        self._cos, self._sin = rotations(shape.inverse_frequencies, context_tokens)

    @property
    def fingerprint(self) -> str:
        release = ".".join(torch.__version__.split(".")[:2])
        return f"{EXACT}-{self._weights.digest}-{torch.backends.cpu.get_cpu_capability().lower()}-{release}"

    def _compute(self, work: Sequence[Work], drawing: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([token for item in work for token in item.ids])
        positions = torch.tensor([at for item in work for at in range(item.start, item.start + len(item.ids))])
        slots = torch.tensor([item.slot for item in work for _ in item.ids])
        turn = self._cos[positions, None], self._sin[positions, None]
        rows = self._weights.embedding[ids].float()
        for index, layer in enumerate(self._weights.layers):
            rows += self._attention(index, layer, rows, turn, (slots, positions), work)
            rows += _mlp(layer, _norm(rows, layer.mlp_norm, self._shape.norm_epsilon))
        final = _norm(rows[list(drawing)], self._weights.final_norm, self._shape.norm_epsilon)
        return self._weights.head(final) if len(final) else torch.empty(0, self.vocab_size)

    def _attention(
        self,
        index: int,
        layer: Layer,
        rows: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        at: tuple[torch.Tensor, torch.Tensor],
        work: Sequence[Work],
    ) -> torch.Tensor:
        shape = self._shape
        mixed = layer.qkv(_norm(rows, layer.attention_norm, shape.norm_epsilon))
        heads = mixed.view(len(rows), -1, shape.head_size)
        turned = shape.heads + shape.kv_heads
        queries, keys = torch.split(heads[:, :turned], [shape.heads, shape.kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = _norm(queries.reshape(-1, shape.head_size), layer.query_norm, shape.norm_epsilon).view(
                queries.shape
            )
            keys = _norm(keys.reshape(-1, shape.head_size), layer.key_norm, shape.norm_epsilon).view(keys.shape)
        queries, keys = _rotate(queries, turn), _rotate(keys, turn)
        slots, positions = at
        self._kv[index, 0][slots, :, positions] = keys
        self._kv[index, 1][slots, :, positions] = heads[:, turned:]
        grouped = (queries * shape.head_size**-0.5).view(len(rows), shape.kv_heads, -1, shape.head_size)
        return layer.output(self._attended(index, grouped, work).view(len(rows), -1))

    def _attended(self, index: int, queries: torch.Tensor, work: Sequence[Work]) -> torch.Tensor:
        """Queries and results: [rows, key heads, heads that share a key head, size]."""
        keys, values = self._views[index]
        rows = queries.unbind(0)
        mixed: list[torch.Tensor] = []
        for item in work:
            mine, end = (keys[item.slot], values[item.slot]), item.start + len(item.ids)
            if item.stepwise:
                for last in range(item.start + 1, end + 1):
                    mixed.append(_step(rows[len(mixed)], *(side.narrow(1, 0, last) for side in mine)))
            else:
                piece = queries[len(mixed) : len(mixed) + len(item.ids)]
                mixed += _piece(piece, *(side.narrow(1, 0, end) for side in mine)).unbind(0)
        return torch.stack(mixed)


def check_library(weights: Weights) -> None:
    """ModelUnusable where the matrix library isn't exact."""
    if not multiplies_exactly(weights.head, weights.architecture.hidden):
        raise ModelUnusable("this machine's matrix library rounds float32 to something shorter; unset what tells it to")


def _norm(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    mean = rows.square().sum(dim=1, keepdim=True) / rows.shape[1]
    return rows / (mean + epsilon).sqrt_() * weight


def _mlp(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up(rows).chunk(2, dim=1)
    return layer.down(silu(gate.contiguous()).mul_(up))


def silu(rows: torch.Tensor) -> torch.Tensor:
    """x / (1 + e⁻ˣ), in place, in pieces that torch never cuts, so that an element's code is always the same."""
    width = rows.shape[1]
    together = max(1, _SERIAL_ELEMENTS // width) if width % 16 == 0 else 1
    for part in torch.split(rows, together):
        F.silu(part, inplace=True)
    return rows


def _rotate(heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding: the first half of a head's dimensions are the real parts, the second the imaginary ones."""
    real, imaginary = heads.chunk(2, dim=2)
    cos, sin = turn
    return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=2)


def _step(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of one position: query [key heads, sharing, size], keys and values [key heads, positions, size]."""
    return torch.bmm(torch.bmm(query, keys.transpose(1, 2)).softmax(dim=2), values)


def _piece(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of a sequence's last positions, each to itself and all before it; queries as many `_step` takes."""
    count, end = len(queries), keys.shape[1]
    seen = torch.ones(count, end, dtype=torch.bool).tril_(end - count)
    heads = queries.view(count, -1, queries.shape[3]).transpose(0, 1)
    mixed = F.scaled_dot_product_attention(
        heads[None], keys[None], values[None], attn_mask=seen, scale=1.0, enable_gqa=True
    )
    return mixed[0].transpose(0, 1).reshape(queries.shape)
