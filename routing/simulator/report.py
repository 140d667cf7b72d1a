"""What a run was like for those who waited."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from routing.shares import WINDOW_MS, by_window
from routing.simulator.flight import Outcome
from routing.simulator.sequence import Sequence
from routing.simulator.timing import COLD, Timing

TTFT_MS, TPOT_MS = 2_000.0, 25.0
"""A request is good if its first token came within the one, and the others within the other on the average"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times in ms. TTFT: from arrival to the first token; TPOT: the mean time of each further one, per request."""

    requests: int
    goodput: float
    """the share of requests that were good; one that failed or was shed is not"""
    hit: float
    """the share of prompt tokens that were found in a cache"""
    ttft_p50_ms: float
    ttft_p99_ms: float
    ttft_mean_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    slowdown_p50: float
    """TTFT next to the request's own on an idle engine with a cold cache"""
    slowdown_p99: float
    shed: int
    """refused, with an answer"""
    failed: int
    attempts_per_request: float
    """sends for each request that wasn't shed"""
    spread: float
    """the busiest engine's work next to the mean: 1 is even"""


def report(outcome: Outcome) -> Report:
    """What became of all requests, in figures."""
    done = outcome.ended
    ttft = [sequence.first_token_ms - sequence.arrival.at_ms for sequence in done]
    slowdown = sorted(ms / COLD.chunked_ms(one.arrival.prompt_tokens) for ms, one in zip(ttft, done, strict=True))
    tpot = [tpot_ms(sequence) for sequence in done if sequence.arrival.output_tokens > 1]
    prompt = sum(sequence.arrival.prompt_tokens for sequence in done)
    total = len(done) + outcome.shed + outcome.failed
    good = sum(map(is_good, done))
    mean = sum(ttft) / max(len(ttft), 1)
    ttft.sort()
    tpot.sort()
    return Report(
        requests=total,
        goodput=good / max(total, 1),
        hit=sum(sequence.cached_tokens for sequence in done) / max(prompt, 1),
        ttft_p50_ms=quantile(ttft, 0.5),
        ttft_p99_ms=quantile(ttft, 0.99),
        ttft_mean_ms=mean,
        tpot_p50_ms=quantile(tpot, 0.5),
        tpot_p99_ms=quantile(tpot, 0.99),
        slowdown_p50=quantile(slowdown, 0.5),
        slowdown_p99=quantile(slowdown, 0.99),
        shed=outcome.shed,
        failed=outcome.failed,
        attempts_per_request=outcome.attempts_per_request,
        spread=spread(outcome),
    )


def shares(outcome: Outcome, window_ms: float = WINDOW_MS) -> list[list[float]]:
    """Window by window each engine's share of the work that came to the engines in it, as it turned out to be."""
    work = [
        (one.queued_ms, engine, work_ms(one, timing))
        for engine, (timing, done) in enumerate(zip(outcome.timings, outcome.by_engine, strict=True))
        for one in done
    ]
    return by_window(work, range(len(outcome.by_engine)), window_ms)


def spread(outcome: Outcome) -> float:
    """Max / mean over the engines of the work they did, in ms of their own time."""
    loads = [
        sum(work_ms(sequence, timing) for sequence in done)
        for timing, done in zip(outcome.timings, outcome.by_engine, strict=True)
    ]
    return max(loads) / max(sum(loads) / len(loads), 1e-9)


def work_ms(sequence: Sequence, timing: Timing) -> float:
    """What a request costs an engine beyond a step's fixed cost: its prefill, and what its tokens' KV adds to each
    decode step (the slope of the decode time at an empty cache)."""
    arrival = sequence.arrival
    tokens = arrival.output_tokens * (arrival.prompt_tokens + arrival.output_tokens / 2)
    slope_ms = (timing.decode_ms(timing.kv_tokens / 1000) - timing.decode_ms(0)) * 1000 / timing.kv_tokens
    return timing.chunked_ms(arrival.prompt_tokens - sequence.cached_tokens) + slope_ms * tokens


def is_good(sequence: Sequence) -> bool:
    """Whether a request that ended was answered as it should be."""
    return sequence.first_token_ms - sequence.arrival.at_ms <= TTFT_MS and tpot_ms(sequence) <= TPOT_MS


def tpot_ms(sequence: Sequence) -> float:
    """The mean time of each token after the first; 0 where there is none."""
    further = sequence.arrival.output_tokens - 1
    return (sequence.finished_ms - sequence.first_token_ms) / further if further else 0.0


def quantile(ordered: Many[float], share: float) -> float:
    """Of values in order, the one that this share doesn't exceed; 0 of none."""
    return ordered[round(share * (len(ordered) - 1))] if ordered else 0.0
