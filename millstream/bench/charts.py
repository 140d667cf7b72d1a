"""The charts of `millstream bench routing`: who keeps promises at which load, and what the earlier design does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millstream.bench import svg
from millstream.bench.contenders import EARLIER, OURS, OURS_RULE
from millstream.bench.row import Row
from routing.shares import WINDOW_MS

_SHOWN = ("round-robin", EARLIER, "cache-aware", "dynamo-4", "lmetric", OURS, OURS_RULE)


def charts(rows: Sequence[Row]) -> Mapping[str, str]:
    """By name; those for which there are figures."""
    found: dict[str, str] = {}
    policies = [row for row in rows if row.section == "policies" and row.policy in _SHOWN]
    if policies:
        found["goodput"] = svg.lines(
            "Good requests as the Mooncake trace is sped up",
            _by_speed(policies),
            x="times as fast",
            y="goodput",
            top=1.0,
        )
        found["hits"] = svg.bars(
            "Prompt tokens found in a cache", _grouped(policies, "hit"), y="share of prompt tokens"
        )
    for section, name, figure, title in (
        ("hardware", "hardware", "spread", "The busiest engine's work next to the mean"),
        ("views", "views", "goodput", "Good requests by age of signals and number of ingresses"),
        ("faults", "faults", "goodput", "Good requests while an engine fails"),
    ):
        some = [row for row in rows if row.section == section and (row.policy in _SHOWN)]
        if some:
            found[name] = svg.bars(title, _grouped(some, figure), y=figure)
    for row in rows:
        if row.shares and "then" in row.scenario and row.policy in (EARLIER, OURS):
            found[f"shares-{row.policy.replace(' ', '-')}"] = _shares(row)
    return found


def _by_speed(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        series.setdefault(row.policy, []).append((float(row.scenario.removeprefix("×")), row.report.goodput))
    return series


def _grouped(rows: Sequence[Row], figure: str) -> dict[str, dict[str, float]]:
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        groups.setdefault(row.scenario, {})[row.policy] = float(getattr(row.report, figure))
    return groups


def _shares(row: Row) -> str:
    engines = zip(*row.shares, strict=True)
    series = {
        f"engine {number}": [(place * WINDOW_MS / 1000, share) for place, share in enumerate(engine)]
        for number, engine in enumerate(engines)
    }
    return svg.lines(f"Engines' shares of the work, {row.scenario}: {row.policy}", series, x="s", y="share", top=0.6)
