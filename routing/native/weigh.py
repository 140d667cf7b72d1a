"""`weigh.cpp` by ctypes: the same numbers as `routing.policy` has from arrays, but for the last bits."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wire.compiled import Library

_INT, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
Weigh = Callable[[Any], None]
"""takes a reference to an Ask, and fills in its answers"""

LIBRARY = Library(
    name="routing",
    sources=Path(__file__).parent,
    flags=("-O3", "-std=c++20", "-ffp-contract=off", "-shared", "-fPIC"),
    without="requests are routed by numpy, at three times the time a choice",
)


class Ask(ctypes.Structure):
    """As in weigh.cpp."""

    _fields_ = [
        *((name, _INT) for name in ("count", "stride", "buckets")),
        *((name, _POINTER) for name in ("numbers", "slacks", "weights", "table", "places", "able", "shares", "blocks")),
        *((name, _DOUBLE) for name in ("now_ms", "prompt_tokens", "block_tokens", "waited_ms", "mean_tokens")),
        *((name, _DOUBLE) for name in ("sent_scale", "binding", "ttft_ms", "tbt_ms")),
        *((name, _INT) for name in ("blamed", "far")),
        *((name, _DOUBLE) for name in ("trust_ms", "prefill_price", "decode_price", "wait_price", "calm")),
        *((name, _DOUBLE) for name in ("ttft_doubt", "tbt_doubt", "least_margin", "stall", "logistic")),
        *((name, _DOUBLE) for name in ("bucket_tokens", "half_life_ms", "clearly", "noise", "excess_price", "tie")),
        ("tried", _INT),
        ("tied", _POINTER),
        ("ties", _INT),
        ("loss", _DOUBLE),
        ("busy", _DOUBLE),
        ("most_blocks", _INT),
        ("waits_ms", _POINTER),
    ]


@functools.cache
def function() -> Weigh | None:
    """`millstream_weigh`, made if it isn't there yet; None where it can't be."""
    library = LIBRARY.load()
    if library is None:
        return None
    weigh = library.millstream_weigh
    weigh.argtypes, weigh.restype = [ctypes.POINTER(Ask)], None
    taken: Weigh = weigh
    return taken


def pointer(array: NDArray[np.generic]) -> int:
    """Of an array's first element; the array must be kept for as long as it is used."""
    address: int = array.ctypes.data
    return address
