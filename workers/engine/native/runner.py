"""The model's forward pass by the native kernels: one call a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from workers.engine.architecture import Architecture
from workers.engine.forward import KV_BLOCK, Runner
from workers.engine.native import library
from workers.engine.native.build import LIBRARY
from workers.engine.native.pack import BLOCK
from workers.engine.native.weights import LINEARS, PackedModel
from workers.engine.rotary import rotations
from workers.engine.scheduler import Work


class NativeRunner(Runner):
    """A row's numbers are computed in the same order in any company and any step: nothing but its sequence matters."""

    def __init__(
        self, kernels: ctypes.CDLL, model: PackedModel, *, slots: int, context_tokens: int, threads: int
    ) -> None:
        shape = model.architecture
        positions = -(-context_tokens // KV_BLOCK) * KV_BLOCK
        # not filled: a page costs memory only once it is used
        kv = torch.empty(shape.layers, 2, slots, shape.kv_heads, positions, shape.head_size, dtype=torch.float16)
        super().__init__(shape, kv)
        self._kernels, self._model, self._threads = kernels, model, threads
        self._turns = rotations(shape.inverse_frequencies, positions)
        self._scratch = kernels.millstream_scratch()
        self._layers = (library.Layer * shape.layers)(*(_layer(model, index) for index in range(shape.layers)))
        self._described = library.Model(
            layers=shape.layers,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            heads=shape.heads,
            key_heads=shape.kv_heads,
            head_size=shape.head_size,
            slots=slots,
            positions=positions,
            epsilon=shape.norm_epsilon,
            layer=self._layers,
            final_norm=_at(model, "final_norm"),
            head=_linear(model, "head"),
            cosines=self._turns[0].data_ptr(),
            sines=self._turns[1].data_ptr(),
            cache=kv.data_ptr(),
            scratch=self._scratch,
        )

    def __del__(self) -> None:
        if hasattr(self, "_scratch"):
            self._kernels.millstream_free(self._scratch)

    @property
    def fingerprint(self) -> str:
        return f"{self._model.numerics.name}-{self._model.digest}-{LIBRARY.digest}"

    def _compute(self, work: Sequence[Work], drawing: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([token for item in work for token in item.ids])
        slots = torch.tensor([item.slot for item in work for _ in item.ids])
        at = torch.tensor([at for item in work for at in range(item.start, item.start + len(item.ids))])
        rows = torch.tensor(drawing, dtype=torch.int64)
        hidden = self._model.embedding[ids].float()
        logits = torch.empty(len(drawing), self._described.head.outputs)
        step = library.Step(
            rows=len(ids),
            hidden=hidden.data_ptr(),
            slots=slots.data_ptr(),
            at=at.data_ptr(),
            draws=len(drawing),
            drawing=rows.data_ptr(),
            logits=logits.data_ptr(),
            threads=self._threads,
        )
        self._kernels.millstream_forward(ctypes.byref(self._described), ctypes.byref(step))
        return logits[:, : self.vocab_size]


def _layer(model: PackedModel, index: int) -> library.Layer:
    prefix = f"layers.{index}."
    return library.Layer(
        attention_norm=_at(model, prefix + "attention_norm"),
        query_norm=_at(model, prefix + "query_norm"),
        key_norm=_at(model, prefix + "key_norm"),
        mlp_norm=_at(model, prefix + "mlp_norm"),
        **{name: _linear(model, prefix + name) for name in LINEARS},
    )


def _linear(model: PackedModel, name: str) -> library.Linear:
    inputs, outputs = linear_shape(model.architecture, name.rsplit(".", 1)[-1])
    heaviest = model.tensors.get(f"{name}.heaviest")
    return library.Linear(
        bits=model.numerics.head_bits if name == "head" else model.numerics.layer_bits,
        inputs=inputs,
        outputs=-(-outputs // BLOCK) * BLOCK,
        weight=_at(model, f"{name}.weight"),
        scale=_at(model, f"{name}.scale"),
        bias=_at(model, f"{name}.bias"),
        heaviest=1.0 if heaviest is None else heaviest.item(),
    )


def linear_shape(architecture: Architecture, name: str) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    queries, keys = architecture.heads * architecture.head_size, architecture.kv_heads * architecture.head_size
    return {
        "qkv": (architecture.hidden, queries + 2 * keys),
        "output": (queries, architecture.hidden),
        "gate_up": (architecture.hidden, 2 * architecture.intermediate),
        "down": (architecture.intermediate, architecture.hidden),
        "head": (architecture.hidden, architecture.vocab_size),
    }[name]


def _at(model: PackedModel, name: str) -> int | None:
    tensor = model.tensors.get(name)
    return None if tensor is None else tensor.data_ptr()
