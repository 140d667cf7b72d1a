"""Which sampler this machine has."""

from __future__ import annotations

from workers.engine.drawing import Sampler
from workers.engine.native.build import kernels
from workers.engine.native.sampler import NativeSampler
from workers.engine.plain_sampler import PlainSampler


def load_sampler(eos_ids: frozenset[int]) -> Sampler:
    """The native one, where its library can be made."""
    library = kernels()
    return PlainSampler(eos_ids) if library is None else NativeSampler(library, eos_ids)
