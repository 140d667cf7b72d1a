"""The numerics classes of the GPU engine, by name. Pure.

How many ranks share a model is part of the class: they add in another order than one would alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from workers.engine.errors import ModelUnusable

_NAME = re.compile(r"(bf16|int8)(?:-tp([2-9]|[1-9][0-9]))?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What MILLSTREAM_NUMERICS asks for."""

    name: str
    int8: bool
    ranks: int

    @classmethod
    def parse(cls, name: str) -> Numerics:
        """Of `bf16`, `int8`, `bf16-tp2`, … ModelUnusable for another name."""
        match = _NAME.match(name)
        if match is None:
            raise ModelUnusable(
                f"MILLSTREAM_NUMERICS is {name!r}; with MILLSTREAM_ENGINE_DEVICE other than cpu use bf16 or int8,"
                f" or with several GPUs bf16-tp2, int8-tp4 and so on"
            )
        return cls(name=name, int8=match[1] == "int8", ranks=int(match[2] or 1))
