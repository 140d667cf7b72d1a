"""Ways to route, side by side in virtual time: `millstream bench routing`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import click
import msgspec

from millstream.bench.charts import charts
from millstream.bench.contenders import CONTENDERS
from millstream.bench.dynamo import Real, replay
from millstream.bench.row import Row
from millstream.bench.scenarios import SECTIONS, Scenario
from millstream.table import table
from millstream.wish import Say
from routing.simulator.report import report, shares
from routing.simulator.run import run
from routing.simulator.trace import Arrival

QUICK_REQUESTS = 3_000
"""The beginning of a trace that is quick to run"""


REAL_SPEEDS = (1.0, 3.0, 4.0, 5.0)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured."""

    rows: list[Row]
    real: list[Real] = []
    """of the real router"""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure: known names, each once."""

    sections: tuple[str, ...]
    policies: tuple[str, ...]
    """none: all that a scenario has"""


def asked(sections: Sequence[str], policies: Sequence[str]) -> Asked:
    """What these names ask for; no sections are all. ClickException for unknown ones."""
    return Asked(
        sections=_known(sections, SECTIONS) or tuple(SECTIONS),
        policies=_known(policies, CONTENDERS),
    )


def measure(asked: Asked, *, quick: bool, peers: bool, say: Say) -> Figures:
    """All that is asked for."""
    return Figures(
        rows=list(rows(asked.sections, asked.policies, quick=quick, say=say)),
        real=list(replay(REAL_SPEEDS, say)) if peers else [],
    )


FIGURES = "figures.json"
FILES = (FIGURES,)
"""What is written whatever is measured; charts come beside it"""


def write(figures: Figures, output: Path) -> None:
    """Figures and charts into a directory. OSError."""
    (output / FIGURES).write_text(as_json(figures) + "\n")
    for name, chart in charts(figures.rows).items():
        (output / f"{name}.svg").write_text(chart)


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """What can be asked for."""

    sections: dict[str, tuple[str, ...]]
    """scenarios' names, by section"""
    policies: tuple[str, ...]


def what_there_is() -> Listed:
    """Sections with their scenarios, and policies."""
    sections = {name: tuple(scenario.name for scenario in made()) for name, made in SECTIONS.items()}
    return Listed(sections=sections, policies=tuple(CONTENDERS))


def listed_as_json(listed: Listed) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(listed), indent=2).decode()


def listed_as_text(listed: Listed) -> str:
    """For people."""
    sections = [(name, "; ".join(scenarios)) for name, scenarios in listed.sections.items()]
    return f"{table(('section', 'scenarios'), sections)}\n\n{table(('policy',), [(name,) for name in listed.policies])}"


def _known(names: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of: {', '.join(known)}. `--list` says what these are.")
    return tuple(dict.fromkeys(names))


def rows(sections: Sequence[str], policies: Sequence[str], *, quick: bool, say: Say) -> Iterator[Row]:
    """Every contender of the scenarios of the sections; only these policies, if there are any."""
    for section in sections:
        for scenario in SECTIONS[section]():
            arrivals = scenario.arrivals()
            if quick:
                arrivals = arrivals[:QUICK_REQUESTS]
            for name in scenario.contenders:
                if not policies or name in policies:
                    say(f"{section}: {scenario.name}, {name}")
                    yield _row(scenario, name, arrivals)


def _row(scenario: Scenario, name: str, arrivals: Sequence[Arrival]) -> Row:
    contender, conditions = CONTENDERS[name], scenario.conditions
    conditions = replace(conditions, rule=contender.rule, signal_ms=conditions.signal_ms or contender.signal_ms)
    began = time.process_time()
    outcome = run(arrivals, contender.make(), conditions)
    return Row(
        section=scenario.section,
        scenario=scenario.name,
        policy=name,
        cpu_s=round(time.process_time() - began, 2),
        virtual_s=round(outcome.ends_ms / 1000, 1),
        report=report(outcome),
        shares=[[round(share, 4) for share in window] for window in shares(outcome)] if _changes(scenario) else [],
    )


def _changes(scenario: Scenario) -> bool:
    return scenario.section == "load"


def as_json(figures: Figures) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(figures), indent=0).decode()


def as_text(figures: Figures) -> str:
    """For people: a table a scenario."""
    tables = [
        f"{section}: {scenario}\n{table(_HEAD, map(_cells, group))}"
        for section, scenario, group in _groups(figures.rows)
    ]
    return "\n\n".join(
        tables + ([f"the real one\n{table(_REAL_HEAD, map(_real_cells, figures.real))}"] if figures.real else [])
    )


def as_markdown(figures: Figures) -> str:
    """For docs/benchmarks.md: the same tables."""
    tables: list[tuple[str, Sequence[str], Iterable[Sequence[str]]]] = [
        (f"{section}: {scenario}", _HEAD, map(_cells, group)) for section, scenario, group in _groups(figures.rows)
    ]
    if figures.real:
        tables.append(("the real router of ai-dynamo 1.6.1", _REAL_HEAD, map(_real_cells, figures.real)))
    return "\n\n".join(
        f"**{title}**\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
        + "\n".join(f"| {' | '.join(cells)} |" for cells in body)
        for title, head, body in tables
    )


def _groups(found: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    for (section, scenario), group in groupby(found, key=lambda row: (row.section, row.scenario)):
        yield section, scenario, list(group)


_REAL_HEAD = ("speed", "policy", "goodput", "hit", "TTFT p50", "p99", "TPOT p50", "p99")
_HEAD = ("policy", "goodput", "hit", "TTFT p50", "p99", "TPOT p50", "p99", "slowdown p99", "spread", "lost")


def _real_cells(real: Real) -> tuple[str, ...]:
    of = real.summary
    return (
        f"{real.speed:g}",
        real.policy,
        f"{of.goodput_completed_requests / of.completed_requests:.3f}",
        f"{of.prefix_cache_reused_ratio:.3f}",
        f"{of.median_ttft_ms:.0f}",
        f"{of.p99_ttft_ms:.0f}",
        f"{of.median_tpot_ms:.1f}",
        f"{of.p99_tpot_ms:.1f}",
    )


def _cells(row: Row) -> tuple[str, ...]:
    of = row.report
    return (
        row.policy,
        f"{of.goodput:.3f}",
        f"{of.hit:.3f}",
        f"{of.ttft_p50_ms:.0f}",
        f"{of.ttft_p99_ms:.0f}",
        f"{of.tpot_p50_ms:.1f}",
        f"{of.tpot_p99_ms:.1f}",
        f"{of.slowdown_p99:.1f}",
        f"{of.spread:.2f}",
        str(of.failed + of.shed),
    )
