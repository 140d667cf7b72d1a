"""Which shard a request goes to. What is known is on the board; the same board and query give the same choice.

1. Eligible: a shard of the request's version and regions, with a weight in the snapshot, whose engine is ready, isn't
   silent, has the features, and takes as many tokens. A shard that was tried is left out; then the choice is a backup.
2. The snapshot's weights say how the traffic is shared between regions and pools: one is drawn, by the request id.
3. Within it, the least expected loss (`routing.loss`), to this request and to those that are there, counts: longest
   prefix, backlog and slack of every engine in one number. Who got clearly more than the share that the snapshot gives
   it pays a price, so weights bind without taking the place of what is known of the moment.
4. Equal losses are drawn by weight. So idle engines share, and many ingresses that know the same don't herd.
5. The older the snapshot, the more equal the weights and the lower the price: no cliff, in the end the loss counts.
6. Without a snapshot: murmur3(model + request id) mod N; a backup is one that isn't silent, if there is one.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import mmh3
import numpy as np
from numpy.typing import NDArray

from routing.board import Board, Candidate, Mask, Rows, Shard
from routing.errors import BadSnapshot
from routing.loss import CALM, Floats, State, own_loss, prefill_ms, rise, worth
from routing.query import Choice, Offer, Query, Reason
from routing.scales import CLEARLY, EXCESS_PRICE, NOISE, TIE, TRIED, Scales, Weighed
from wire.messages import Snapshot

__all__ = ["Choice", "Offer", "Policy", "Query", "Reason"]

FRESH_MS = 3_000
"""A snapshot up to this age is followed as it is: control may miss two of its rounds"""
STALE_MS = 30_000
"""From this age on its weights mean nothing any more: load has turned over several times"""
SILENT_MS = 1_500
"""An engine that is heard this much less recently than another is taken to be gone: it missed two of its signals"""

MOST = 1e300
"""Any loss is less"""
PLANS = 1_024
"""Sets of candidates whose rows are remembered: one a model's version and region"""

NOTHING: frozenset[Shard] = frozenset()


class Priced(NamedTuple):
    """What a plan's candidates would cost, by arrays."""

    own: Floats
    """what the request itself would lose, and the prices"""
    others: Callable[[NDArray[np.intp]], Floats]
    """what those that are there would lose, for some of them"""
    blocks: NDArray[np.intp]
    """of the prompt's beginning, thought to be cached"""
    waits_ms: Floats
    full: Mask
    """where it would have to wait, or make long steps"""


class Field(NamedTuple):
    """What a request's candidates are weighed by."""

    plan: Plan
    able: Mask
    relax: float
    reason: Reason | None
    """if it is known beforehand"""


@dataclass(slots=True, kw_only=True)
class Plan:
    """The engines to choose among: what follows from candidates and snapshot alone, entry by entry."""

    asked: tuple[Candidate, ...]
    """what was asked for"""
    candidates: tuple[Candidate, ...]
    """of these, those that may be weighed"""
    rows: Rows
    places: NDArray[np.intp]
    """the same, as numbers"""
    weights: Floats
    """their shares of one another"""
    groups: NDArray[np.intp]
    """which region and pool, numbered"""
    alive: Mask
    """by the signals so far: `Board.living`"""
    known: bool
    """whether the engine of every one has been heard"""
    signals: int


class Policy:
    """Chooses for one model, from its board and the latest snapshot that was followed."""

    def __init__(self, board: Board, *, native: bool = True) -> None:
        """`native`: weigh in C++ where that can be had; the choices are the same."""
        self.board = board
        self._scales = Scales.made(board) if native else None
        self._followed: Snapshot | None = None
        self._snapshot: Snapshot | None = None
        """the followed one, if it is sound"""
        self._plans: dict[int, Plan] = {}

    def follow(self, snapshot: Snapshot | None) -> None:
        """The weights to keep to from now on. One with a weight that is negative or no number counts as none."""
        if snapshot is self._followed:
            return
        self._followed = snapshot
        self._snapshot = snapshot if snapshot is not None and _sound(snapshot) else None
        self._plans.clear()

    def choose(self, query: Query, now_ms: float, exclude: frozenset[Shard] = NOTHING) -> Choice | None:
        """The shard for a request; None if there is no candidate that isn't excluded."""
        if not query.candidates or (exclude and exclude.issuperset(query.candidates)):
            return None
        draw = Draw(query.request_id, query.model)
        field = self._field(query, draw, now_ms, exclude)
        if field is None:
            there = self._there(query, exclude) if self._snapshot is not None else ()
            if there:
                return Choice(*_hashed(there, exclude, draw), "unfit")
            gone = self._gone(query, exclude)
            return Choice(*_hashed(_near(query, gone), gone, draw), "hashed")
        plan, able, relax, reason = field
        return self._least(query, plan, able, relax, draw, now_ms, reason)

    def silent(self, candidates: tuple[Candidate, ...]) -> frozenset[Candidate]:
        """Those whose engine is taken to be gone: `Board.silent`."""
        silent = self.board.silent(self.board.rows(candidates), SILENT_MS)
        return frozenset(candidates[n] for n in silent.nonzero()[0].tolist())

    def offers(self, query: Query, now_ms: float, exclude: frozenset[Shard] = NOTHING) -> tuple[Offer, ...]:
        """What a request would cost at each candidate, by what `choose` goes by; of none without any knowledge."""
        field = self._field(query, Draw(query.request_id, query.model), now_ms, exclude)
        if field is None:
            return ()
        plan, able, relax, _ = field
        weights = _faded(plan.weights, relax)
        priced = self._priced(query, plan, able, weights, relax, now_ms)
        losses = priced.own + priced.others(np.arange(len(plan.candidates)))
        return tuple(
            Offer(
                candidate=candidate,
                weight=weights.item(n),
                able=able.item(n),
                cached_tokens=self._cached(query, priced.blocks.item(n)),
                wait_ms=priced.waits_ms.item(n),
                loss=losses.item(n),
            )
            for n, candidate in enumerate(plan.candidates)
        )

    def _field(self, query: Query, draw: Draw, now_ms: float, exclude: frozenset[Shard]) -> Field | None:
        """Who may be chosen; None where nothing is known of anybody."""
        if self._snapshot is None:
            return None
        plan = self._plan(query.candidates, self._snapshot)
        if (able := self._able(query, plan, exclude)) is not None:
            relax = relaxation(now_ms - self._snapshot.created_ms)
            reason: Reason | None = "backup" if exclude else "local" if relax == 1 else None
            return Field(plan, _one_group(plan, able, draw), relax, reason)
        plan = self._make_plan(query.candidates, dict.fromkeys(self._spoken(query.candidates), 1.0))
        if (able := self._able(query, plan, exclude)) is not None:
            return Field(plan, able, 1.0, "backup")
        return None

    def _gone(self, query: Query, exclude: frozenset[Shard]) -> frozenset[Shard]:
        """Where the hash may not send: what was tried, and then what is silent, too, as long as anything is left."""
        gone = exclude | self.silent(query.candidates) if exclude else exclude
        return exclude if gone.issuperset(query.candidates) else gone

    def _cached(self, query: Query, blocks: int) -> int:
        """Tokens of the prompt that so many blocks save: the last one is always computed."""
        return query.prompt_tokens - max(query.prompt_tokens - blocks * self.board.block_tokens, 1)

    def _able(self, query: Query, plan: Plan, exclude: frozenset[Shard]) -> Mask | None:
        """Which of the plan's candidates may be chosen; None if none may."""
        board, rows = self.board, plan.rows
        if not plan.candidates:
            return None
        if plan.signals != board.signals:
            plan.alive, plan.signals = board.living(rows, SILENT_MS), board.signals
            plan.known = bool(board.speaks(rows).all())
        able: Mask = plan.alive & board.takes(rows, query.prompt_tokens + query.answer_tokens)
        if query.residency is not None:
            able &= np.array([candidate.fleet.region == query.residency for candidate in plan.candidates])
        if query.features:
            able &= board.offers(rows, query.features)
        if exclude:
            able &= np.array([candidate not in exclude for candidate in plan.candidates])
        return able if able.any() else None

    def _least(
        self, query: Query, plan: Plan, able: Mask, relax: float, draw: Draw, now_ms: float, reason: Reason | None
    ) -> Choice:
        """The least loss; of equal ones, a draw by weight."""
        weights = _faded(plan.weights, relax) if relax else plan.weights
        weigh = self._scales.weighed if self._scales is not None and plan.known else self._weighed
        found = weigh(query, plan, able, weights, relax, now_ms)
        tied = found.tied
        best = tied[0] if len(tied) == 1 else tied[draw.pick([weights.item(n) for n in tied], 1)]
        blocks = found.blocks[best]
        cached = self._cached(query, blocks)
        if reason is None:
            reason = "weight" if len(tied) > 1 else "affinity" if 0 < blocks == found.most_blocks else "loss"
        fleet, shard = plan.candidates[best]
        return Choice(fleet, shard, reason, found.loss, cached, found.waits_ms.item(best), found.busy)

    def _weighed(self, query: Query, plan: Plan, able: Mask, weights: Floats, relax: float, now_ms: float) -> Weighed:
        """By arrays over all of a plan's candidates."""
        own, others, blocks, waits_ms, full = self._priced(query, plan, able, weights, relax, now_ms)
        own[~able] = np.inf
        some = _promising(own)
        loss = own[some] + others(some)
        least = loss.min()
        return Weighed(
            tied=some[loss <= least + TIE].tolist(),
            loss=float(least),
            blocks=blocks.tolist(),
            most_blocks=int(blocks.max()),
            waits_ms=waits_ms,
            busy=float((able & full).sum() / able.sum()),
        )

    def _priced(self, query: Query, plan: Plan, able: Mask, weights: Floats, relax: float, now_ms: float) -> Priced:
        """What each of a plan's candidates would cost, whether or not it is able."""
        board, rows = self.board, plan.rows
        blocks = np.array(board.chains.matches(query.prefix_chain, board.size), dtype=np.intp)[rows]
        new_tokens = np.maximum(query.prompt_tokens - blocks * board.block_tokens, 1.0)
        state = board.state(rows, now_ms)
        after_ms = state.decode_ms + state.decode_token_ms * query.prompt_tokens
        own, others = self._losses(query, plan, state, able, new_tokens, after_ms)
        if board.blamed:
            own += board.risk(rows, now_ms)
        if relax < 1:
            own += (1 - relax) * _excess(board.lately(rows, now_ms), weights)
        waits_ms = state.wait_ms
        return Priced(own, others, blocks, waits_ms, (waits_ms > 0) | (after_ms > CALM * board.targets.tbt_ms))

    def _losses(
        self, query: Query, plan: Plan, state: State, able: Mask, new_tokens: Floats, after_ms: Floats
    ) -> tuple[Floats, Callable[[NDArray[np.intp]], Floats]]:
        """The request's own losses at a plan's candidates; and for some of them, what others would lose there."""
        board = self.board
        prompt_ms, pieces = prefill_ms(state, new_tokens)
        waited_ms = query.waited_ms + board.trips_ms(plan.rows)
        own = own_loss(
            state,
            prompt_ms=prompt_ms,
            pieces=pieces,
            after_ms=after_ms,
            waited_ms=waited_ms,
            worth=worth(state, able),
            targets=board.targets,
        )

        def others(some: NDArray[np.intp]) -> Floats:
            crowd = board.crowd(plan.places[some], state.backlog_ms[some], state.gained_ms[some], state.rested_ms[some])
            return rise(
                crowd,
                prompt_ms=prompt_ms[some],
                before_ms=state.decode_ms[some],
                after_ms=after_ms[some],
                table=board.lengths.table,
                targets=board.targets,
            )

        return own, others

    def _spoken(self, candidates: tuple[Candidate, ...]) -> list[Candidate]:
        """Those whose engine has been heard."""
        speaks = self.board.speaks(self.board.rows(candidates))
        return [candidate for candidate, spoke in zip(candidates, speaks, strict=True) if spoke]

    def _there(self, query: Query, exclude: frozenset[Shard]) -> Sequence[Candidate]:
        """Those that live, whatever they can do."""
        spoken = self._spoken(query.candidates)
        alive = self.board.living(self.board.rows(spoken), SILENT_MS).tolist()
        return [
            candidate
            for candidate, lives in zip(spoken, alive, strict=True)
            if lives and candidate not in exclude and query.residency in (None, candidate.fleet.region)
        ]

    def _plan(self, candidates: tuple[Candidate, ...], snapshot: Snapshot) -> Plan:
        plan = self._plans.get(id(candidates))
        if plan is None or plan.asked is not candidates:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            routed = {Candidate(route.fleet, route.shard): route.weight for route in snapshot.routes}
            plan = self._plans[id(candidates)] = self._make_plan(candidates, routed)
        return plan

    def _make_plan(self, asked: tuple[Candidate, ...], routed: Mapping[Candidate, float]) -> Plan:
        candidates = tuple(candidate for candidate in asked if routed.get(candidate, 0.0) > 0)
        names = [(fleet.region, fleet.pool) for fleet, _ in candidates]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        weights = np.array([routed[candidate] for candidate in candidates])
        rows = self.board.rows(candidates)
        return Plan(
            asked=asked,
            candidates=candidates,
            rows=rows,
            places=np.arange(self.board.size)[rows],
            weights=weights / weights.sum() if candidates else weights,
            groups=np.array([numbers[name] for name in names], dtype=np.intp),
            alive=np.zeros(len(candidates), dtype=bool),
            known=False,
            signals=-1,
        )


def check(snapshot: Snapshot) -> None:
    """BadSnapshot unless its weights are finite, non-negative and sum to 1 (or there are no routes)."""
    if not _sound(snapshot):
        raise BadSnapshot(f"the snapshot of {snapshot.model!r} holds a weight that is negative or no number")
    if snapshot.routes and abs(sum(route.weight for route in snapshot.routes) - 1) > 1e-6:
        raise BadSnapshot(f"the weights of the snapshot of {snapshot.model!r} don't sum to 1")


def relaxation(age_ms: float) -> float:
    """How far a snapshot of this age is given up: 0 = followed as it is, 1 = not at all."""
    return min(max((age_ms - FRESH_MS) / (STALE_MS - FRESH_MS), 0.0), 1.0)


class Draw:
    """Numbers that follow from the request alone, so that a decision can be replayed."""

    def __init__(self, request_id: str, model: str) -> None:
        key = (model + request_id).encode("utf-8", "surrogatepass")
        self.number = int(mmh3.hash(key, signed=False))
        self._first, step = map(int, mmh3.hash64(key, seed=1, signed=False))
        self._step = step | 1

    def pick(self, weights: Sequence[float], n: int) -> int:
        """An index, with its weight's share of probability; another `n`, another draw."""
        table = list(accumulate(weights))
        share = (self._first + n * self._step) % 2**64 / 2**64
        return min(bisect(table, share * table[-1]), len(table) - 1)


def _sound(snapshot: Snapshot) -> bool:
    return all(0 <= route.weight < math.inf for route in snapshot.routes)


def _promising(own: Floats) -> NDArray[np.intp]:
    """The TRIED with the least losses of their own, those that tie with the last of them, and none that can't be."""
    if len(own) > TRIED:
        limit = min(np.partition(own, TRIED - 1).item(TRIED - 1) + TIE, MOST)
    else:
        limit = MOST
    return (own <= limit).nonzero()[0]


def _one_group(plan: Plan, able: Mask, draw: Draw) -> Mask:
    """Those of one region and pool, drawn by weight: how much a pool gets is the snapshot's to say."""
    groups = plan.groups
    if groups.max() == 0:
        return able
    shares = np.bincount(groups, weights=plan.weights * able)
    one: Mask = able & (groups == draw.pick(shares.tolist(), 0))
    return one


def _faded(weights: Floats, relax: float) -> Floats:
    """Weights that are ever more equal, with `relax`."""
    return weights * (1 - relax) + relax / len(weights)


def _excess(lately: Floats, weights: Floats) -> Floats | float:
    """The price of going clearly over a share: what was sent lately and this request, against the share of it all."""
    due = weights * (float(lately.sum()) + 1)
    over = lately - CLEARLY * due - NOISE * np.sqrt(due)
    if over.max() <= 0:
        return 0.0
    price: Floats = EXCESS_PRICE * np.maximum(over, 0.0) / (due + 1)
    return price


def _near(query: Query, exclude: frozenset[Shard]) -> Sequence[Candidate]:
    """The candidates at home, if one is left there; or else all."""
    home = [candidate for candidate in query.candidates if candidate.fleet.region == query.home]
    return query.candidates if exclude.issuperset(home) else home


def _hashed(candidates: Sequence[Candidate], exclude: frozenset[Shard], draw: Draw) -> Candidate:
    """murmur3(model + request id) mod N in a stable order; an excluded shard's requests go to the next one."""
    order = sorted(candidates)
    start = draw.number % len(order)
    return next(c for c in order[start:] + order[:start] if c not in exclude)
