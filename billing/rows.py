"""Lines as rows of the table `attempts` and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from billing.charge import Line
from wire.fleet import Fleet
from wire.messages import Usage

USAGE_COLUMNS = tuple(field.name for field in msgspec.structs.fields(Usage))
PRICE_COLUMNS = (
    "price_id",
    "input_picodollars",
    "cached_input_picodollars",
    "output_picodollars",
    "billable",
    "amount_nanodollars",
)
COLUMNS = USAGE_COLUMNS + PRICE_COLUMNS


def row_of(line: Line) -> dict[str, Any]:
    """A line's row, by column, of values that JSON knows."""
    row = {name: getattr(line.usage, name) for name in USAGE_COLUMNS}
    row["fleet"] = line.usage.fleet.name
    return row | {name: getattr(line, name) for name in PRICE_COLUMNS}


def line_of(row: Mapping[str, Any]) -> Line:
    """The line of a row."""
    usage = {name: row[name] for name in USAGE_COLUMNS}
    usage["fleet"] = Fleet.parse(usage["fleet"])
    prices = {name: row[name] for name in PRICE_COLUMNS}
    prices["billable"] = bool(prices["billable"])
    return Line(usage=Usage(**usage), **prices)
