"""Queries are values: named, described SQL files of billing/queries, loaded once and tested as such."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

from billing.errors import SchemaError

_HEADER = re.compile(r"-- name: (?P<name>\w+)\n-- description: (?P<description>.+)\n-- params: (?P<params>.+)\n")
_USED = re.compile(r"\{(\w+):")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query with its name, what it answers, and the parameters it takes."""

    name: str
    description: str
    params: tuple[str, ...]
    sql: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaFile:
    """A numbered step of the schema: one statement."""

    version: int
    name: str
    sql: str
    """as it stands in the file, comments too: its checksum is of this"""


def load_query(name: str) -> Query:
    """The query of billing/queries/<name>.sql. SchemaError when its header doesn't describe it."""
    return parse_query(name, _directory("queries").joinpath(f"{name}.sql").read_text("utf-8"))


def query_names() -> tuple[str, ...]:
    """The names of all queries."""
    return tuple(sorted(file.name.removesuffix(".sql") for file in _sql_files("queries")))


def parse_query(name: str, text: str) -> Query:
    """The query in a file's text."""
    match = _HEADER.match(text)
    if match is None or match["name"] != name:
        raise SchemaError(f"query {name}: begin with '-- name: {name}', '-- description: …', '-- params: …'")
    stated = (
        () if match["params"] == "none" else tuple(p.split()[0] for p in re.split(r",\s*(?![^()]*\))", match["params"]))
    )
    sql = text[match.end() :].strip()
    if set(stated) != set(_USED.findall(sql)):
        raise SchemaError(f"query {name}: its header names the parameters {stated}, its text uses others")
    return Query(name=name, description=match["description"], params=stated, sql=sql)


def schema_files() -> tuple[SchemaFile, ...]:
    """The steps of the schema, in their order. SchemaError when the numbers aren't 1, 2, 3 …"""
    steps = []
    for file in sorted(_sql_files("schema"), key=lambda f: f.name):
        number, _, name = file.name.removesuffix(".sql").partition("_")
        steps.append(SchemaFile(version=int(number), name=name, sql=file.read_text("utf-8")))
    if [step.version for step in steps] != list(range(1, len(steps) + 1)):
        raise SchemaError("the schema's files must be numbered 001, 002, 003 … without a gap")
    return tuple(steps)


def _directory(name: str) -> Traversable:
    return files("billing").joinpath(name)


def _sql_files(directory: str) -> list[Traversable]:
    return [file for file in _directory(directory).iterdir() if file.name.endswith(".sql")]
