"""Policies side by side in virtual time, on traces of real traffic."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec

from millstream.bench import traces
from millstream.table import table
from routing.simulator.peers import PEERS
from routing.simulator.report import Report
from routing.simulator.run import simulate

POLICIES = tuple(PEERS)
SPEEDS = (1.0, 3.0, 4.0, 5.0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace."""

    trace: str
    speed: float
    policy: str
    cpu_s: float
    report: Report


def rows(policies: Sequence[str], speeds: Sequence[float]) -> Iterator[Row]:
    """Every policy at every speed of the Mooncake trace."""
    for speed in speeds:
        arrivals = traces.mooncake(speed=speed)
        for name in policies:
            began = time.process_time()
            result = simulate(arrivals, PEERS[name]())
            yield Row(trace="mooncake", speed=speed, policy=name, cpu_s=time.process_time() - began, report=result)


def as_json(found: Sequence[Row]) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()


def as_text(found: Sequence[Row]) -> str:
    """For people."""
    head = ("speed", "policy", "goodput", "hit", "TTFT p50", "p99", "TPOT p50", "p99", "slowdown p99", "CPU s")
    return table(head, [(row.speed, row.policy, *_figures(row.report), round(row.cpu_s, 1)) for row in found])


def _figures(report: Report) -> tuple[str, ...]:
    times = (report.ttft_p50_ms, report.ttft_p99_ms, report.tpot_p50_ms, report.tpot_p99_ms, report.slowdown_p99)
    return (f"{report.goodput:.3f}", f"{report.hit:.3f}", *(f"{value:.1f}" for value in times))
