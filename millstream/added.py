"""Models of the user's own: converted once by `millstream model add`, checked, and kept in the cache."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from millstream import model
from millstream.errors import UnknownModel
from millstream.model import ModelFailed
from millstream.stack import Served, simulated, smollm2
from millstream.table import table
from millstream.wish import Say
from wire.fleet import slug_of

_MAGIC = b"GGUF"
MANIFEST = "millstream.json"
_FORMAT = 1
"""goes up when what is written changes: older ones must be added again"""
_CONTEXT_TOKENS = 2048
"""of one request at most: what a local engine keeps room for in each slot"""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,94}[A-Za-z0-9])?")
_FOR_GGUF, _FOR_SAFETENSORS = 9, 3
"""room that the conversion takes, in sizes of the source"""


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """What was added, as its directory says."""

    name: str
    source: str
    """what it was made from; for people"""
    context_tokens: int
    size_bytes: int
    added_ms: int
    format: int = _FORMAT

    def served(self, directory: Path) -> Served:
        """The model as a stack serves it."""
        return Served(
            name=self.name,
            numerics=smollm2().numerics,
            engine_kind="torch",
            owned_by="local",
            context_tokens=self.context_tokens,
            directory=directory,
        )


def add(cache: Path, source: Path, name: str | None, say: Say) -> Added:
    """Convert, check and keep a model; it is there whole or not at all. ModelFailed says what is wrong with it."""
    source = source.resolve()
    if not source.exists():
        raise ModelFailed(f"{source} isn't there; give a GGUF file, or a directory with config.json and safetensors")
    if source.is_file() and not _is_gguf(source):
        raise ModelFailed(f"{source} is not a GGUF file; give one, or a directory with config.json and safetensors")
    chosen = _checked(name or _name_of(source), given=name is not None)
    wanted = _directory(cache, chosen)
    _insist_new(wanted, chosen)
    size_bytes = _size_bytes(source)
    model.check_room(wanted.parent, size_bytes * (_FOR_SAFETENSORS if source.is_dir() else _FOR_GGUF))
    with model.alone(wanted.parent, say), tempfile.TemporaryDirectory(prefix=model.SCRATCH, dir=wanted.parent) as temp:
        _insist_new(wanted, chosen)
        made = Path(temp) / "model"
        say(f"Converting {source.name} ({size_bytes / 1e6:,.0f} MB)")
        command = (sys.executable, "-m", "millstream.convert", str(source), str(made))
        model.run(command, f"{source.name} can't be used", say)
        added = _described(made, chosen, source)
        (made / MANIFEST).write_bytes(msgspec.json.encode(added))
        made.rename(wanted)
    return added


def _is_gguf(source: Path) -> bool:
    with source.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def every(cache: Path) -> list[Added]:
    """Everything that was added, by name."""
    found = (_read(path.parent) for path in _models(cache).glob(f"added-*/{MANIFEST}"))
    return sorted((added for added in found if added is not None), key=lambda added: added.name)


def remove(cache: Path, name: str) -> None:
    """Delete it. UnknownModel. A stack that serves it goes on until it ends."""
    directory = _directory(cache, name)
    _known(cache, directory, name)
    gone = directory.with_name(f"{model.SCRATCH}{directory.name}")
    shutil.rmtree(gone, ignore_errors=True)
    directory.rename(gone)
    shutil.rmtree(gone)


def served_of(cache: Path, name: str) -> Served:
    """The model of this name, as a stack serves it. UnknownModel."""
    if name == smollm2().name:
        return smollm2()
    directory = _directory(cache, name)
    return _known(cache, directory, name).served(directory)


def _known(cache: Path, directory: Path, name: str) -> Added:
    added = _read(directory)
    if added is None or added.name != name:
        names = ", ".join(each.name for each in every(cache)) or "none"
        raise UnknownModel(f"no model {name!r} was added; added were: {names}; `millstream model add PATH` adds one")
    return added


def as_text(found: list[Added]) -> str:
    """For people."""
    if not found:
        return "no models were added; `millstream up` serves " + smollm2().name
    rows = [[each.name, f"{each.context_tokens:,}", f"{each.size_bytes / 1e6:,.0f} MB", each.source] for each in found]
    return table(["model", "context", "size", "from"], rows)


def as_json(found: list[Added]) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def _checked(name: str, *, given: bool) -> str:
    if not _NAME.fullmatch(name) or ".." in name or "//" in name:
        hint = "" if given else "; give it another one with --name"
        raise ModelFailed(
            f"{name[:96]!r} can't be a model's name: use up to 96 letters, digits, dots, dashes and slashes{hint}"
        )
    if slug_of(name) in (slug_of(smollm2().name), slug_of(simulated().name)):
        raise ModelFailed(f"{name!r} is the name of a model that is always there; give this one another with --name")
    return name


def _name_of(source: Path) -> str:
    return source.stem if source.suffix == ".gguf" else source.name


def _insist_new(wanted: Path, name: str) -> None:
    if wanted.exists():
        raise ModelFailed(
            f"there is a model {name!r}, or one whose name differs in nothing but case and dashes; "
            f"`millstream model remove` it, or give this one another name with --name"
        )


def _models(cache: Path) -> Path:
    return cache / "models"


def _directory(cache: Path, name: str) -> Path:
    return _models(cache) / f"added-{slug_of(name)}"


def _size_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _described(made: Path, name: str, source: Path) -> Added:
    from workers.engine.architecture import Architecture

    return Added(
        name=name,
        source=str(source),
        context_tokens=min(_CONTEXT_TOKENS, Architecture.read(made).context_tokens),
        size_bytes=sum(file.stat().st_size for file in made.iterdir()),
        added_ms=time.time_ns() // 1_000_000,
    )


def _read(directory: Path) -> Added | None:
    """None where there is none, or one of another format."""
    try:
        added = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=Added)
    except (OSError, msgspec.MsgspecError):
        return None
    return added if added.format == _FORMAT else None
