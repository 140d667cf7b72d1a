"""Libraries in C++ that this machine's compiler makes the first time; they are kept for every later start."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPILERS = ("g++", "c++", "clang++")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """Sources, and how they are compiled."""

    name: str
    sources: Path
    """the directory with the files to compile, and what they include"""
    flags: Sequence[str]
    without: str
    """what happens where it can't be had, for the log"""

    @property
    def digest(self) -> str:
        """Six characters that change with the sources and the flags."""
        digest = hashlib.sha256("\0".join(self.flags).encode())
        for path in sorted(self.sources.glob("*.[ch]*")):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:6]

    def path(self, environ: Mapping[str, str] = os.environ) -> Path:
        """Where it is kept: $XDG_CACHE_HOME/millstream/native, or ~/.cache/millstream/native."""
        base = environ.get("XDG_CACHE_HOME")
        cache = Path(base) if base else Path.home() / ".cache"
        return cache / "millstream" / "native" / f"{self.name}-{self.digest}.so"

    def possible(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether it is there, or there is a compiler."""
        return self.path(environ).is_file() or _compiler(environ) is not None

    def load(self, environ: Mapping[str, str] = os.environ) -> ctypes.CDLL | None:
        """The library, made if it isn't there yet (seconds); None where it can't be."""
        path = self.path(environ)
        if not path.is_file() and not self.build(path, environ):
            return None
        try:
            return ctypes.CDLL(str(path))
        except OSError as exc:
            _log.warning("%s can't be loaded: %s; %s", path, exc, self.without)
            return None

    def build(self, path: Path, environ: Mapping[str, str]) -> bool:
        """Compile to `path`, whole or not at all; False, and a line in the log, if that can't be done."""
        if (compiler := _compiler(environ)) is None:
            _log.warning("no C++ compiler found: %s; install g++", self.without)
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                made = Path(scratch) / path.name
                command = (compiler, *self.flags, *map(str, sorted(self.sources.glob("*.cpp"))), "-o", str(made))
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                if result.returncode == 0:
                    made.replace(path)
                    return True
                complaint = next((line for line in result.stderr.splitlines() if "error" in line), "no error line")
                _log.warning("%s can't build %s: %s; %s", compiler, self.name, complaint, self.without)
        except OSError as exc:
            _log.warning("%s can't be kept in %s: %s; %s", self.name, path.parent, exc.strerror, self.without)
        return False


def _compiler(environ: Mapping[str, str]) -> str | None:
    wanted = (environ.get("CXX", ""), *_COMPILERS)
    return next((found for name in wanted if name and (found := shutil.which(name, path=environ.get("PATH")))), None)
