"""What a run of the simulator gave, as it is kept."""

from __future__ import annotations

import msgspec

from routing.simulator.report import Report


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one scenario."""

    section: str
    scenario: str
    policy: str
    cpu_s: float
    """of simulating it, this policy's decisions included"""
    virtual_s: float
    report: Report
    shares: list[list[float]] = []
    """by half minutes and engine, of the work that came; under a load that changes only"""
