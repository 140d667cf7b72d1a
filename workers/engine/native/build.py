"""The kernels' library: built by the machine's C++ compiler the first time, kept for every later start."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from pathlib import Path

from wire.compiled import Library

LIBRARY = Library(
    name="kernels",
    sources=Path(__file__).parent,
    # no -march=native: the same instructions, and so the same numbers, on every machine
    flags=("-O3", "-mavx2", "-mfma", "-mf16c", "-std=c++20", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC"),
    without="the model runs in plain torch, several times slower",
)
_NEEDED = {"avx2", "fma", "f16c"}


def possible(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this machine has what the kernels need: AVX2, and a compiler or a library made before."""
    return _capable() and LIBRARY.possible(environ)


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library, made if it isn't there yet (a few seconds); None where it can't be."""
    library = LIBRARY.load() if _capable() else None
    return None if library is None else typed(library)


def typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """Its functions, typed. With torch imported before, both use the same OpenMP threads."""
    library.millstream_scratch.restype = ctypes.c_void_p
    library.millstream_free.argtypes = [ctypes.c_void_p]
    library.millstream_forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.millstream_forward.restype = None
    library.millstream_multiply.argtypes = [*(ctypes.c_void_p,) * 2, ctypes.c_int64, ctypes.c_void_p]
    library.millstream_multiply.restype = None
    library.millstream_draw.argtypes = [ctypes.c_void_p]
    library.millstream_draw.restype = None
    library.millstream_uniform.argtypes = [*(ctypes.c_uint64,) * 4]
    library.millstream_uniform.restype = ctypes.c_double
    return library


def _capable(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):  # not Linux, or not x86
        return False
    return set(flags.split()) >= _NEEDED
