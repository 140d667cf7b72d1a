"""`millstream bench routing`: what it runs, what it writes, what it says to a mistake."""

from __future__ import annotations

import errno
import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from millstream import cli
from millstream.bench import dynamo, engine_setting, pipeline, routing, svg, traces
from millstream.bench.charts import charts
from millstream.bench.contenders import CONTENDERS, EARLIER, OURS
from millstream.bench.output import insist_directory, insist_file
from millstream.bench.row import Row
from millstream.bench.scenarios import SECTIONS, Scenario, by_region, mooncake, spread_out, step_in_demand
from millstream.errors import StackError, StartFailed
from routing.simulator.trace import Arrival

FEW = 60


def beginning() -> list[Arrival]:
    return mooncake(4.0)[:FEW]


def small() -> Iterator[Scenario]:
    names = (EARLIER, OURS, "lmetric")
    for section, name in (
        ("policies", "×4"),
        ("hardware", "8 alike"),
        ("views", "one"),
        ("faults", "none"),
        ("load", "×2, then ×4"),
    ):
        yield Scenario(section=section, name=name, arrivals=beginning, contenders=names)


@pytest.fixture
def only_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "SECTIONS", {"small": small})


@pytest.mark.usefixtures("only_small")
def test_it_writes_figures_and_charts(tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "out"
    out.mkdir()
    figures = routing.measure(routing.asked((), ()), quick=True, peers=False, say=said.append)
    routing.write(figures, out)
    assert len(figures.rows) == len(said) == 15
    assert msgspec.json.decode((out / "figures.json").read_bytes(), type=routing.Figures) == figures
    drawn = sorted(path.stem for path in out.glob("*.svg"))
    assert drawn == ["faults", "goodput", "hardware", "hits", "shares-earlier-design", "shares-millstream", "views"]
    for path in out.glob("*.svg"):
        ElementTree.parse(path)
    text, page = routing.as_text(figures), routing.as_markdown(figures)
    assert text.count("lmetric") == page.count("| lmetric |") == 5
    assert figures.rows[0].report.requests == FEW


@pytest.mark.usefixtures("only_small")
def test_only_what_is_asked_for_is_run() -> None:
    figures = routing.measure(routing.asked(("small",), (OURS,)), quick=False, peers=False, say=lambda _: None)
    assert {row.policy for row in figures.rows} == {OURS}
    for sections, policies in ((("none",), ()), ((), ("none",))):
        with pytest.raises(click.BadParameter, match="'none' is none of"):
            routing.asked(sections, policies)


def test_a_name_that_is_repeated_counts_once() -> None:
    asked = routing.asked(("views", "faults", "views"), (OURS, OURS, "lmetric"))
    assert asked == routing.Asked(sections=("views", "faults"), policies=(OURS, "lmetric"))


def bench(*argv: str) -> Result:
    return CliRunner().invoke(cli.cli, ["bench", *argv])


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad place must be refused before anything is measured."""

    def never(*_args: object, **_named: object) -> None:
        raise AssertionError("it was measured")

    for module, name in ((routing, "measure"), (pipeline, "measure"), (engine_setting, "prepare")):
        monkeypatch.setattr(module, name, never)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("what", ["routing", "engine"])
@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("", "it is empty; name a directory"),
        ("/proc/x", "can't be written"),
        ("/dev/full/x", "can't be written"),
        ("/dev/full", "can't be written: Not a directory"),
        ("x" * 300, "can't be written: File name too long"),
        ("taken", "figures.json' can't be written: Is a directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before(
    what: str, output: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken" / "figures.json").mkdir(parents=True)
    shown = bench(what, "--output", output)
    assert shown.exit_code == 2
    assert said in " ".join(shown.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("output", "said"),
    [("", "it is empty; name a file"), ("/proc/x", "can't be written"), ("no/x", "No such file"), (".", "directory")],
)
def test_a_file_that_cannot_be_written_is_refused_before(
    output: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = bench("pipeline", "--output", output)
    assert shown.exit_code == 2
    assert said in " ".join(shown.output.split())


def test_looking_at_a_place_leaves_what_is_there(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    insist_directory(out, ("figures.json",))
    assert list(out.iterdir()) == []
    (out / "figures.json").write_text("before")
    (out / "views.svg").write_text("before")
    insist_directory(out, ("figures.json",))
    insist_file(out / "figures.json")
    assert {path.read_text() for path in out.iterdir()} == {"before"}
    insist_file(Path("/dev/full"))  # a device's room shows only when it is written
    (out / "hits.svg").mkdir()
    with pytest.raises(click.BadParameter, match=r"hits.svg' can't be written"):
        insist_directory(out, ("figures.json",))


@pytest.mark.usefixtures("only_small")
def test_figures_that_cannot_be_written_after_all_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_figures: routing.Figures, _output: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(routing, "write", full)
    shown = bench("routing", "--quick", "--policy", "lmetric", "--json", "--output", str(tmp_path / "out"))
    assert isinstance(shown.exception, StackError)
    assert "only shown: No space left on device" in str(shown.exception)
    assert len(json.loads(shown.stdout)["rows"]) == 5


def test_the_list_is_json_where_that_is_asked_for() -> None:
    listed = json.loads(bench("routing", "--list", "--json").stdout)
    assert list(listed["sections"]) == list(SECTIONS)
    assert listed["policies"] == list(CONTENDERS)
    assert all(listed["sections"].values())


def test_it_says_what_there_is() -> None:
    shown = routing.listed_as_text(routing.what_there_is())
    assert shown == bench("routing", "--list").stdout.rstrip("\n")
    assert all(name in shown for name in (*SECTIONS, *CONTENDERS, "half of it in one"))


@pytest.mark.usefixtures("only_small")
def test_the_real_router_stands_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    one = dynamo.Real(policy="dynamo-4", speed=4.0, summary=dynamo.summary(SUMMARY))
    monkeypatch.setattr(routing, "replay", lambda speeds, say: iter([one]))
    figures = routing.measure(routing.asked(("small",), ("lmetric",)), quick=True, peers=True, say=lambda _: None)
    assert figures.real == [one]
    assert "the real one" in routing.as_text(figures)
    assert "| 4 | dynamo-4 | 0.861 | 0.209 | 194 | 1789 | 19.1 | 65.4 |" in routing.as_markdown(figures)


SUMMARY = """a line it logs
{"completed_requests": 12031, "goodput_completed_requests": 10361, "prefix_cache_reused_ratio": 0.2094,
"median_ttft_ms": 194.4, "p99_ttft_ms": 1789.4, "median_tpot_ms": 19.14, "p99_tpot_ms": 65.4, "num_requests": 12031}
""".replace(",\n", ", ")


def test_an_answer_that_is_no_report_is_said() -> None:
    with pytest.raises(StartFailed, match="isn't its report"):
        dynamo.summary("Traceback")


def test_it_is_installed_once_into_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[list[str]] = []

    def run(argv: list[str]) -> str:
        ran.append(argv)
        (tmp_path / "millstream" / f"ai-dynamo-{dynamo.VERSION}").mkdir(parents=True, exist_ok=True)
        return SUMMARY

    monkeypatch.setattr(dynamo, "_run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    found = [one for _ in range(2) for one in dynamo.replay((4.0,), said.append)]
    assert [one.policy for one in found] == ["round robin", "dynamo-1", "dynamo-4"] * 2
    assert sum("venv" in argv for argv in ran) == 1
    assert sum(line.startswith("installing") for line in said) == 1


def test_what_cannot_be_run_is_said() -> None:
    assert dynamo._run(["echo", "yes"]) == "yes\n"
    with pytest.raises(StartFailed, match="can't be run here"):
        dynamo._run(["false"])
    with pytest.raises(StartFailed, match="can't be run here"):
        dynamo._run(["/no/such/program"])


def test_every_scenario_has_its_requests_in_order_and_known_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    some = traces.mooncake()[:500]
    monkeypatch.setattr(traces, "mooncake", partial(sped_up, some))
    for section, make in SECTIONS.items():
        names = set()
        for scenario in make():
            assert scenario.section == section
            assert set(scenario.contenders) <= set(CONTENDERS)
            names.add(scenario.name)
            times = [one.at_ms for one in scenario.arrivals()]
            assert times == sorted(times)
        assert len(names) > 2


def sped_up(some: list[Arrival], speed: float) -> list[Arrival]:
    return [replace(one, at_ms=one.at_ms / speed) for one in some]


def test_a_step_in_demand_is_one() -> None:
    times = [one.at_ms for one in step_in_demand(2.0, 4.0, 400e3)]
    before, after = (sum(start <= at < start + 300e3 for at in times) for start in (100e3, 400e3))
    assert 1.7 < after / before < 2.3


def test_requests_stay_within_their_step_of_the_trace() -> None:
    moved = {one.number: one.at_ms for one in spread_out(4.0)}
    assert all(0 <= moved[one.number] - one.at_ms <= 750 for one in mooncake(4.0))


def test_regions_get_their_share() -> None:
    regions = [one.region for one in by_region(4.0, {"a": 3.0, "b": 1.0})]
    assert 0.72 < regions.count("a") / len(regions) < 0.78


def test_a_chart_has_a_line_or_a_bar_for_each_and_names_them() -> None:
    lines = svg.lines("a < b", {"one": [(0, 0), (10, 1)], "two": [(0, 0.5), (10, 0.5)]}, x="s", y="share")
    assert lines.count("<polyline") == 2
    assert "a &lt; b" in lines
    bars = svg.bars("t", {"first": {"x": 1.0, "y": 0.0}, "second": {"x": 2.0}}, y="n", top=4)
    assert bars.count('<rect x="') == 3 + 2  # and the two boxes of the legend
    assert ">second<" in bars
    flat = svg.bars("nothing", {"only": {"x": 0.0}}, y="n")
    ElementTree.fromstring(flat)


def test_without_figures_there_are_no_charts() -> None:
    none: list[Row] = []
    assert charts(none) == {}
