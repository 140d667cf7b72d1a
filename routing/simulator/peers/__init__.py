"""Policies that others published, each after the formula that its docstring names; to run beside Millstream's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from routing.simulator.peers.affinity import AIBrix, CacheAware, Sticky
from routing.simulator.peers.cost import Dynamo, LMetric
from routing.simulator.peers.load import LeastLoad, PowerOfTwo, Prequal, RoundRobin
from routing.simulator.policy import Policy

PEERS: Mapping[str, Callable[[], Policy]] = {
    "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
    "least-load": LeastLoad,
    "prequal": Prequal,
    "cache-aware": CacheAware,
    "aibrix": AIBrix,
    "llm-d": Sticky,
    "dynamo-1": Dynamo,
    "dynamo-4": partial(Dynamo, scale=4.0),
    "lmetric": LMetric,
}
"""By the names that `millstream bench routing` knows them by"""
