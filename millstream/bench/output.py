"""Where a measurement's figures are to go: looked at before it, since it takes minutes, and written after it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from millstream.errors import StackError


def insist_directory(path: Path, names: Iterable[str]) -> None:
    """Make the directory, and see that these files, and the charts that are there, can be written in it. BadParameter
    if not."""
    with _refusing(path):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        path.mkdir(parents=True, exist_ok=True)
        for file in (*(path / name for name in names), *path.glob("*.svg")):
            _try(file)


def insist_file(path: Path) -> None:
    """See that this file can be written. BadParameter if not."""
    with _refusing(path):
        _try(path)


def keep(shown: str, path: Path | None, write: Callable[[Path], object]) -> None:
    """Write figures if there is a place for them, and show them whatever comes of that. StackError if it fails all the
    same: the disk is full, or something was moved meanwhile."""
    try:
        if path is not None:
            write(path)
    except OSError as exc:
        raise StackError(f"the figures can't be written to {path}, only shown: {exc.strerror or exc}") from exc
    finally:
        click.echo(shown)


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise click.BadParameter(
            f"{str(exc.filename or path)!r} can't be written: {exc.strerror or exc}; name another place",
            param_hint="'--output'",
        ) from exc


def _try(file: Path) -> None:
    """OSError if this file can't be written. What is in it stays; one that wasn't there isn't there afterwards."""
    there = os.path.lexists(file)
    if there and file.exists() and not (stat.S_ISREG(file.stat().st_mode) or file.is_dir()):
        return  # a pipe's reader would take our closing for the end
    os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666))
    if not there:
        file.unlink()
