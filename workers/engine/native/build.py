"""The kernels' library: built by the machine's C++ compiler the first time, kept for every later start."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-mavx2", "-mfma", "-mf16c", "-std=c++20", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
"""no -march=native: the same instructions, and so the same numbers, on every machine"""
_NEEDED = {"avx2", "fma", "f16c"}
_COMPILERS = ("g++", "c++", "clang++")
_log = logging.getLogger(__name__)


def source_digest() -> str:
    """Six characters that change with the kernels."""
    digest = hashlib.sha256("\0".join(_FLAGS).encode())
    for path in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:6]


def possible(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this machine has what the kernels need: AVX2, and a compiler or a library made before."""
    return _capable() and (library_path(environ).is_file() or _compiler(environ) is not None)


@functools.cache
def kernels() -> ctypes.CDLL | None:
    """The library, made if it isn't there yet (a few seconds); None where it can't be."""
    if not _capable():
        return None
    path = library_path(os.environ)
    return loaded(path) if path.is_file() or build(path, os.environ) else None


def library_path(environ: Mapping[str, str]) -> Path:
    """Where the library of these sources is kept: $XDG_CACHE_HOME/millstream/native, or ~/.cache/millstream/native."""
    base = environ.get("XDG_CACHE_HOME")
    cache = Path(base) if base else Path.home() / ".cache"
    return cache / "millstream" / "native" / f"kernels-{source_digest()}.so"


def build(path: Path, environ: Mapping[str, str]) -> bool:
    """Compile to `path`, whole or not at all; False, and a line in the log, if that can't be done."""
    if (compiler := _compiler(environ)) is None:
        _log.warning("no C++ compiler found: the model runs in plain torch, several times slower; install g++")
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            made = Path(scratch) / path.name
            command = (compiler, *_FLAGS, *map(str, sorted(SOURCES.glob("*.cpp"))), "-o", str(made))
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                made.replace(path)
                return True
            complaint = next((line for line in result.stderr.splitlines() if "error" in line), "no error line")
            _log.warning("%s can't build the kernels: %s; the model runs in plain torch", compiler, complaint)
    except OSError as exc:
        _log.warning("the kernels can't be kept in %s: %s; the model runs in plain torch", path.parent, exc.strerror)
    return False


def loaded(path: Path) -> ctypes.CDLL:
    """Its functions, typed. With torch imported before, both use the same OpenMP threads."""
    library = ctypes.CDLL(str(path))
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


def _compiler(environ: Mapping[str, str]) -> str | None:
    wanted = (environ.get("CXX", ""), *_COMPILERS)
    return next((found for name in wanted if name and (found := shutil.which(name, path=environ.get("PATH")))), None)
