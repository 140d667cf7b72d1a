"""Policies that others published, each after the formula that its docstring names; to run beside Millstream's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from routing.simulator.policy import Policy, RoundRobin

PEERS: Mapping[str, Callable[[], Policy]] = {
    "round-robin": RoundRobin,
}
"""By the names that `millstream bench routing` knows them by"""
