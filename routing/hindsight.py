"""What many choices that were made again come to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from routing.board import Candidate
from routing.replay import Decision
from routing.shares import WINDOW_MS, by_window, swing


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """Of one model's choices."""

    model: str
    decisions: int
    reasons: Mapping[str, int]
    """choices by reason, the most frequent first"""
    alike: float | None
    """the share of those that were weighed that would go there again; None where none was weighed"""
    weighed: int
    """choices whose regret is known"""
    regret_mean: float | None
    regret_p99: float | None
    regret_worst: float | None
    """in requests; None where none was weighed"""
    worst_request_id: str | None
    """whose regret is the worst"""
    swing: float | None
    """of the engines' shares of the prompt tokens that were to be computed; None within one window"""
    cached_tokens: int
    """of the prompts, thought to be cached where they went"""
    prompt_tokens: int


def hindsight(decisions: Iterable[Decision], window_ms: float = WINDOW_MS) -> tuple[Hindsight, ...]:
    """Model by model, in the order of their names."""
    tallies: dict[str, _Tally] = {}
    for decision in decisions:
        tallies.setdefault(decision.dispatch.model, _Tally()).add(decision)
    return tuple(tally.sum_up(model, window_ms) for model, tally in sorted(tallies.items()))


@dataclass(slots=True)
class _Tally:
    """Kept of each decision only what the figures need: there may be a great many."""

    reasons: Counter[str] = field(default_factory=Counter)
    alike: list[bool] = field(default_factory=list)
    regrets: list[tuple[float, str]] = field(default_factory=list)
    work: list[tuple[float, Candidate, float]] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def add(self, decision: Decision) -> None:
        dispatch = decision.dispatch
        self.reasons[dispatch.reason] += 1
        if decision.alike is not None:
            self.alike.append(decision.alike)
        if decision.regret is not None:
            self.regrets.append((decision.regret, dispatch.request_id))
        new_tokens = max(dispatch.prompt_tokens_estimate - dispatch.cached_tokens, 1)
        self.work.append((decision.at_ms, decision.chosen, float(new_tokens)))
        self.cached_tokens += dispatch.cached_tokens
        self.prompt_tokens += dispatch.prompt_tokens_estimate

    def sum_up(self, model: str, window_ms: float) -> Hindsight:
        regrets = sorted(self.regrets)
        known = [regret for regret, _ in regrets]
        windows = by_window(self.work, {engine for _, engine, _ in self.work}, window_ms)
        return Hindsight(
            model=model,
            decisions=len(self.work),
            reasons=dict(self.reasons.most_common()),
            alike=sum(self.alike) / len(self.alike) if self.alike else None,
            weighed=len(known),
            regret_mean=sum(known) / len(known) if known else None,
            regret_p99=known[round(0.99 * (len(known) - 1))] if known else None,
            regret_worst=known[-1] if known else None,
            worst_request_id=regrets[-1][1] if regrets else None,
            swing=swing(windows) if len(windows) > 1 else None,
            cached_tokens=self.cached_tokens,
            prompt_tokens=self.prompt_tokens,
        )
