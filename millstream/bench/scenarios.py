"""The runs of `millstream bench routing`: traces, and what happens to the fleet meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from millstream.bench import traces
from millstream.bench.contenders import CONTENDERS, EARLIER, OURS, OURS_RULE
from routing.simulator.conditions import Conditions, Crash, CutOff, Fault, Slow
from routing.simulator.generated import generate
from routing.simulator.run import IDEAL
from routing.simulator.timing import COLD, Timing
from routing.simulator.trace import Arrival

FAST = Timing(prefill_speed=1.8, decode_speed=1.5)
"""An H100 next to an A100, on an 8k prompt and per token"""
GRID_MS = 3_000.0
"""The Mooncake trace gives times in steps of this"""
SOME = ("round-robin", "dynamo-4", "lmetric", EARLIER, OURS, OURS_RULE)
_EUROPE, _AMERICA, _ASIA = "europe", "america", "asia"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One trace under one set of conditions, for some contenders."""

    section: str
    name: str
    arrivals: Callable[[], Sequence[Arrival]]
    contenders: tuple[str, ...]
    conditions: Conditions = IDEAL
    """a contender's own rule, and its signals where none are said here, go into them"""


def mooncake(speed: float) -> list[Arrival]:
    return traces.mooncake(speed=speed)


def spread_out(speed: float, seed: int = 1) -> list[Arrival]:
    """The Mooncake trace with every request at a random time of its step. As they stand, requests of 3 s come at the
    same instant: no ingress could know of the others', and none has to in the world."""
    draw = Random(seed)
    moved = [replace(one, at_ms=one.at_ms + draw.random() * GRID_MS / speed) for one in traces.mooncake(speed=speed)]
    return sorted(moved, key=lambda one: one.at_ms)


def step_in_demand(before: float, after: float, at_ms: float) -> list[Arrival]:
    """A trace whose speed changes at a time."""
    return [
        replace(one, at_ms=one.at_ms / before)
        if one.at_ms / before < at_ms
        else replace(one, at_ms=at_ms + (one.at_ms - at_ms * before) / after)
        for one in spread_out(1.0)
    ]


def by_region(speed: float, shares: Mapping[str, float], seed: int = 1) -> list[Arrival]:
    """Requests that come from regions, by share. A session stays where it is: its prompts have the second piece in
    common, the first one is everybody's."""
    regions, weights = list(shares), list(shares.values())
    return [
        replace(one, region=Random(seed + one.prefix[:2][-1]).choices(regions, weights)[0])
        for one in spread_out(speed, seed)
    ]


def _policies() -> Iterator[Scenario]:
    for speed in (1.0, 3.0, 4.0, 5.0):
        yield Scenario(
            section="policies", name=f"×{speed:g}", arrivals=partial(mooncake, speed), contenders=tuple(CONTENDERS)
        )


def _traces() -> Iterator[Scenario]:
    everybody = tuple(CONTENDERS)
    yield Scenario(section="traces", name="azure ×20", arrivals=partial(traces.azure, speed=20.0), contenders=everybody)
    for speed in (12.0, 16.0):
        yield Scenario(
            section="traces",
            name=f"sessions ×{speed:g}",
            arrivals=partial(generate, 3_600.0, speed=speed),
            contenders=everybody,
        )


def _views() -> Iterator[Scenario]:
    for signal_ms in (250.0, 1_000.0, 4_000.0):
        for ingresses, follow_ms in ((1, None), (16, None), (16, 20.0)):
            told = "not told" if follow_ms is None else f"told after {follow_ms:g} ms"
            many = "one ingress" if ingresses == 1 else f"{ingresses} ingresses, {told}"
            yield Scenario(
                section="views",
                name=f"signals each {signal_ms / 1000:g} s, {many}",
                arrivals=partial(spread_out, 4.0),
                contenders=("lmetric", OURS),
                conditions=Conditions(signal_ms=signal_ms, ingresses=ingresses, follow_ms=follow_ms),
            )


def _faults() -> Iterator[Scenario]:
    faults: dict[str, tuple[Fault, ...]] = {
        "none": (),
        "crash, back after 100 s": (Crash(engine=2, at_ms=300e3, until_ms=400e3),),
        "crash for good": (Crash(engine=2, at_ms=300e3, until_ms=1e9),),
        "4 times slower for 100 s": (Slow(engine=2, at_ms=300e3, until_ms=400e3, factor=4.0),),
    }
    for name, what in faults.items():
        yield Scenario(
            section="faults",
            name=name,
            arrivals=partial(spread_out, 3.0),
            contenders=SOME,
            conditions=Conditions(signal_ms=500.0, faults=what),
        )


def _load() -> Iterator[Scenario]:
    for speed in (4.0, 6.0, 8.0):
        yield Scenario(section="load", name=f"×{speed:g}", arrivals=partial(mooncake, speed), contenders=SOME)
    yield Scenario(
        section="load",
        name="×2, then ×4 from 400 s on",
        arrivals=partial(step_in_demand, 2.0, 4.0, 400e3),
        contenders=SOME,
    )


def _hardware() -> Iterator[Scenario]:
    for name, timings, speed in (
        ("8 alike", (COLD,) * 8, 4.0),
        ("4 fast, 4 slow", (FAST,) * 4 + (COLD,) * 4, 5.0),
        ("1 fast, 7 slow", (FAST,) + (COLD,) * 7, 4.0),
    ):
        yield Scenario(
            section="hardware",
            name=name,
            arrivals=partial(spread_out, speed),
            contenders=SOME,
            conditions=Conditions(timings=timings, signal_ms=500.0),
        )


def _regions() -> Iterator[Scenario]:
    places = Conditions(
        timings=(COLD,) * 9,
        regions=(_EUROPE, _AMERICA, _ASIA),
        rtt_ms={(_EUROPE, _AMERICA): 80.0, (_EUROPE, _ASIA): 160.0, (_AMERICA, _ASIA): 120.0},
        signal_ms=500.0,
    )
    even = {_EUROPE: 1.0, _AMERICA: 1.0, _ASIA: 1.0}
    cases: dict[str, tuple[dict[str, float], tuple[Fault, ...]]] = {
        "even": (even, ()),
        "half of it in one": ({**even, _EUROPE: 2.0}, ()),
        "one cut off for 100 s": (even, (CutOff(region=_ASIA, at_ms=300e3, until_ms=400e3),)),
    }
    for name, (shares, faults) in cases.items():
        yield Scenario(
            section="regions",
            name=name,
            arrivals=partial(by_region, 4.0, shares),
            contenders=SOME,
            conditions=replace(places, faults=faults),
        )


SECTIONS: Mapping[str, Callable[[], Iterator[Scenario]]] = {
    "policies": _policies,
    "traces": _traces,
    "views": _views,
    "faults": _faults,
    "load": _load,
    "hardware": _hardware,
    "regions": _regions,
}
"""By the names that `millstream bench routing --section` knows them by"""
