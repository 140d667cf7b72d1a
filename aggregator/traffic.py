"""What is asked of each model, folded from the ingresses' signals."""

from __future__ import annotations

from collections import defaultdict

from routing.plan import TYPICAL, Traffic
from routing.profile import Mix
from wire.messages import DemandSignal

SILENT_MS = 2_500
"""An ingress that says nothing for this long asks nothing any more; it signals once a second"""
UNKNOWN_IS_LITTLE = 1.0
"""Requests a second below which their mean lengths are too noisy to be told from what is typical"""


class Asked:
    """The latest of every ingress, by model. Times are those of `aggregator.windows`."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], tuple[DemandSignal, float]] = {}

    def hear(self, signal: DemandSignal, time_ms: float) -> None:
        """One more signal; one of an earlier life of its ingress is replaced."""
        if signal.model:
            self._latest[signal.model, signal.ingress] = signal, time_ms

    def of(self, model: str, time_ms: float) -> Traffic:
        """What is asked of a model now, as far as is known."""
        signals = [
            signal
            for (name, _), (signal, heard_ms) in self._latest.items()
            if name == model and time_ms - heard_ms <= SILENT_MS
        ]
        demand: dict[str, float] = defaultdict(float)
        refused: dict[str, float] = defaultdict(float)
        priorities: dict[int, float] = defaultdict(float)
        for signal in signals:
            demand[signal.region] += _positive(signal.requests_per_s)
            refused[signal.region] += _positive(signal.refused_per_s)
            for priority, requests in signal.priorities.items():
                if priority.removeprefix("-").isdecimal():
                    priorities[int(priority)] += _positive(requests)
        sent = sum(demand.values()) - sum(refused.values())
        return Traffic(demand=demand, refused=refused, mix=_mix(signals, sent), priorities=priorities)

    def forget(self, time_ms: float) -> None:
        """Drop what is out of date."""
        self._latest = {name: one for name, one in self._latest.items() if time_ms - one[1] <= SILENT_MS}


def _mix(signals: list[DemandSignal], sent: float) -> Mix:
    """`sent`: requests a second; refused ones have no answer, and their prompts aren't counted."""
    prompts = sum(_positive(signal.prompt_tokens_per_s) for signal in signals)
    answers = sum(_positive(signal.tokens_per_s) for signal in signals)
    if sent < UNKNOWN_IS_LITTLE or not prompts or not answers:
        return TYPICAL
    return Mix(prompt_tokens=prompts / sent, answer_tokens=answers / sent)


def _positive(value: float | None) -> float:
    """A rate; what is no positive number counts as none."""
    return value if value is not None and 0 < value < float("inf") else 0.0
