"""Queries and schema as values."""

from __future__ import annotations

from pathlib import Path

import pytest

from billing.errors import SchemaError
from billing.queries import SchemaFile, load_query, parse_query, query_names, schema_files
from billing.store import checksum, pending_steps


@pytest.mark.parametrize("name", query_names())
def test_every_query_says_what_it_is(name: str) -> None:
    query = load_query(name)
    assert query.name == name
    assert query.description.endswith((".", "?"))
    assert query.sql


def test_every_schema_step_is_numbered_and_described() -> None:
    steps = schema_files()
    assert [step.version for step in steps] == list(range(1, len(steps) + 1))
    assert all(step.sql.startswith("-- ") for step in steps)


def test_a_gap_in_the_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("001_a.sql", "003_b.sql"):
        (tmp_path / name).write_text("SELECT 1")
    monkeypatch.setattr("billing.queries._directory", lambda name: tmp_path)
    with pytest.raises(SchemaError, match="without a gap"):
        schema_files()


def test_nothing_in_the_schema_depends_on_when_a_row_is_written() -> None:
    assert not any("now(" in step.sql.lower().replace("no default now()", "") for step in schema_files())


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "-- name: other\n-- description: d.\n-- params: none\nSELECT 1",
        "-- name: q\n-- description: d.\n-- params: none\nSELECT {x:Int64}",
        "-- name: q\n-- description: d.\n-- params: x Int64\nSELECT 1",
    ],
)
def test_a_query_that_is_not_described_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="query q"):
        parse_query("q", text)


def test_a_parameters_type_may_hold_commas() -> None:
    text = "-- name: q\n-- description: d.\n-- params: a Array(Tuple(String, String)), b Int64\nSELECT {a:X}, {b:Int64}"
    assert parse_query("q", text).params == ("a", "b")


def step(version: int, sql: str = "SELECT 1") -> SchemaFile:
    return SchemaFile(version=version, name="x", sql=sql)


def test_only_steps_that_were_not_applied_are_pending() -> None:
    assert pending_steps([step(1), step(2)], {1: checksum(step(1))}) == [step(2)]


def test_a_step_that_changed_since_it_was_applied_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"001_x\.sql has changed since it was applied"):
        pending_steps([step(1, "SELECT 2")], {1: checksum(step(1))})


def test_a_database_newer_than_the_program_is_refused() -> None:
    with pytest.raises(SchemaError, match="at version 2, newer than this program"):
        pending_steps([step(1)], {1: checksum(step(1)), 2: "x"})
