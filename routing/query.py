"""What the policy is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from routing.row import Candidate
from wire.fleet import Fleet

Reason = Literal["affinity", "loss", "weight", "local", "backup", "unfit", "hashed"]
"""least loss, having the prompt's beginning · least loss · equal losses, drawn by weight · least loss, the snapshot
being stale · another one failed · engines are known, and none can serve it: whichever gets it will say so · without
any knowledge"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A request that must go somewhere."""

    request_id: str
    model: str
    candidates: tuple[Candidate, ...]
    """every shard of every fleet that may serve it: its version, in the regions where it may be. The same tuple for the
    same fleets is recognised, and quicker"""
    prompt_tokens: int = 1
    answer_tokens: int = 0
    """at most; 0 where nobody said"""
    prefix_chain: tuple[int, ...] = ()
    residency: str | None = None
    """the region it must not leave"""
    home: str | None = None
    """the region that it came to: it stays there while nothing is known of any engine"""
    features: frozenset[str] = frozenset()
    waited_ms: float = 0.0
    """since it came in"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The shard a request goes to, and why."""

    fleet: Fleet
    shard: int
    reason: Reason
    loss: float = 0.0
    """expected, in requests; 0 where nothing was weighed"""
    cached_tokens: int = 0
    """of the prompt, thought to be in its cache"""
    wait_ms: float = 0.0
    """thought to pass there until its prompt is begun"""
    busy: float = 0.0
    """the share of engines where it would have to wait, or make steps almost as long as was promised"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A candidate as it stands to a request."""

    candidate: Candidate
    weight: float
    """its share of the traffic of these candidates, by the snapshot as far as that is still followed"""
    able: bool
    """whether it may be chosen: it can serve the request, wasn't tried, and is of the drawn region and pool"""
    cached_tokens: int
    wait_ms: float
    """thought to pass there until the prompt is begun"""
    loss: float
    """expected, in requests, with the price of going over its share"""
