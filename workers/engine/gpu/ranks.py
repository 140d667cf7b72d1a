"""What the ranks of one model exchange in a forward pass. One rank exchanges nothing.

An all-reduce adds in an order that depends on where a number lies in the message, and so on the rows beside it. Here
every rank gets all parts and adds them in the order of the ranks (R8).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


class Ranks(Protocol):
    rank: int
    size: int

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's part, on each of them."""
        ...

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's columns side by side: [rows, n] → [rows, n · size]."""
        ...

    def least(self, number: int) -> int:
        """The smallest that a rank named."""
        ...


class Alone:
    """A model that is whole on one device."""

    rank = 0
    size = 1

    def total(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def least(self, number: int) -> int:
        return number


class Group:
    """One of several ranks of this machine; calls must come in the same order on each. A rank that dies fails them."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        if device.type == "cuda":
            dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size, device_id=device)
        else:
            dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        first, *others = self._all(part).unbind(0)
        total = first.clone()
        for other in others:
            total += other
        return total

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        return self._all(part).transpose(0, 1).flatten(1)

    def least(self, number: int) -> int:
        return int(self._all(torch.tensor([number], device=self._device)).min())

    def _all(self, part: torch.Tensor) -> torch.Tensor:
        """[ranks, …]"""
        every = torch.empty((self.size, *part.shape), dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(every.flatten(0, 1) if part.dim() > 1 else every.flatten(), part.contiguous())
        return every
