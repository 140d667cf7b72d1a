"""Where weights come from: a model directory's files, read a part at a time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from workers.engine.errors import ModelUnusable

_PROBES = 64
_PROBE_BYTES = 1 << 16


class Source(Protocol):
    """Named tensors, of which a rank reads its own part."""

    @property
    def digest(self) -> str:
        """Changes with the weights."""
        ...

    def has(self, name: str) -> bool: ...

    def read(self, name: str, axis: int, begin: int, end: int) -> torch.Tensor:
        """What is from `begin` to `end` along an axis of a tensor. ModelUnusable."""
        ...


class Files:
    """The safetensors files of a model directory, mapped into memory: nothing is read before it is asked for."""

    def __init__(self, model_dir: Path) -> None:
        """ModelUnusable for files that are missing or broken."""
        self._model_dir = model_dir
        index = model_dir / "model.safetensors.index.json"
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values())) if index.is_file() else []
            self._paths = [model_dir / name for name in names or ["model.safetensors"]]
            self._files = {
                tensor: file
                for file in (safe_open(path, framework="pt") for path in self._paths)
                for tensor in file.keys()  # noqa: SIM118
            }
        except (OSError, SafetensorError, ValueError, KeyError) as exc:
            raise ModelUnusable(f"{model_dir} has no whole set of safetensors files; convert the model again") from exc

    @property
    def digest(self) -> str:
        """Of sizes, headers and probes spread over the files: hashing tens of gigabytes would take minutes."""
        digest = hashlib.sha256()
        for path in self._paths:
            size = path.stat().st_size
            with path.open("rb") as file:
                for probe in range(_PROBES):
                    file.seek(size * probe // _PROBES)
                    digest.update(file.read(_PROBE_BYTES))
            digest.update(f"{path.name} {size};".encode())
        return digest.hexdigest()[:8]

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, axis: int, begin: int, end: int) -> torch.Tensor:
        if name not in self._files:
            raise ModelUnusable(f"{self._model_dir} lacks the tensor {name}")
        whole = self._files[name].get_slice(name)
        part: torch.Tensor = whole[begin:end] if axis == 0 else whole[:, begin:end]
        return part
