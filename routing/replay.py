"""Choices made again, with all that the log knew when they were made.

What would a better informed ingress have done, and what was the difference worth?

Every engine's signals, the snapshots, the dispatches and the endings of one region go onto one board a model, in order
of time, and each dispatch is put to the policy before it goes onto the board. The regret of a choice is the loss that
is expected where the request went, less the least loss of those that were able. It is not a fault of the policy: given
what it knew, an ingress makes the choice that it made. It is what not knowing more cost: siblings not heard in time, a
snapshot that was on its way.

What a replay can't know:

- an ingress's lag: what of this had reached it. That is the difference that is measured, so it can't be told apart;
- what only one ingress saw: an ending in the milliseconds before its usage is in the log, a refusal's reason, an ending
  in another region. Of an answer of several choices it knows only their sum. Where that made a difference the ingress
  knew more than the replay, and the regret is that of the replay's own ignorance;
- what ended before it begins: how long answers get it learns anew, from ten minutes before the first choice weighed;
- shards that neither signal nor snapshot names: a choice among nothing but these can't be weighed;
- how far the clocks of the machines are apart: what happened before what goes by what each wrote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from routing.board import NOWHERE, Board, Candidate, Name
from routing.errors import BadSnapshot
from routing.penalties import Outcome
from routing.policy import Policy, check
from routing.prefix import BLOCK_TOKENS
from routing.query import Choice, Offer, Query
from wire.messages import Dispatch, Dispatches, EngineSignal, FinishReason, Snapshot, Usage, Usages

WARM_UP_MS = 60_000.0
"""What has to be known before the first choice that is weighed: engines tell all that is in their caches each 20 s, and
a snapshot means nothing after 30"""
LEARN_MS = 600_000.0
"""How far before that endings are read: how long answers get says what a choice costs, and is learned from hundreds"""
SNAPSHOTS = 64
"""Of a model, remembered for those who still follow an old one: a minute's"""
OPEN_MS = 600_000.0
"""An attempt is taken to be over after so long, if no ending is heard of"""
OUTCOMES: Mapping[FinishReason, Outcome] = {
    "stop": "answered",
    "length": "answered",
    "tool_calls": "answered",
    "content_filter": "answered",
    "error": "failed",
    "moved": "timed_out",
}
"""What endings say of the engine"""

Version = tuple[str, str, str]
"""A model's slug, version and numerics: what a request's candidates have in common"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A dispatch, and whose it is."""

    ingress: str
    dispatch: Dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An attempt's ending."""

    model: str
    name: Name
    outcome: Outcome | None
    tokens: int
    """of its answer"""


class Moment(NamedTuple):
    """Something that the log knew from then on."""

    at_ms: float
    what: EngineSignal | Snapshot | Ended | Sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A choice that was made, and what there is to say of it afterwards."""

    at_ms: float
    ingress: str
    dispatch: Dispatch
    """with the choice as it was made"""
    followed: Snapshot | None
    """the snapshot that it followed; None without one, or where it isn't in the log any more"""
    again: Choice | None
    """the choice with all that the log knew; None where that was nothing"""
    offers: tuple[Offer, ...]
    """what it would have cost everywhere"""
    engines: Mapping[Candidate, str]
    """whose these were"""
    regret: float | None
    """in requests; None where nothing was known of the shard that was chosen"""

    @property
    def chosen(self) -> Candidate:
        """Where it went."""
        return Candidate(self.dispatch.fleet, self.dispatch.shard)

    @property
    def alike(self) -> bool | None:
        """Whether it would go there again; None where nothing was known."""
        return None if self.again is None else (self.again.fleet, self.again.shard) == self.chosen


def moments(message: object, logged_ms: float) -> Iterator[Moment]:
    """What a message tells, and when. `logged_ms`: when it came into the log."""
    match message:
        case EngineSignal() | Snapshot():
            yield Moment(logged_ms, message)
        case Dispatches():
            for one in message.sent:
                at_ms = message.at_ms if one.at_ms is None else one.at_ms
                yield Moment(at_ms, Sent(ingress=message.ingress, dispatch=one))
        case Usages():
            for usage in message.entries:
                yield Moment(logged_ms, _ended(usage))


def _ended(usage: Usage) -> Ended:
    return Ended(
        model=usage.model,
        name=(usage.request_id, usage.attempt),
        outcome=OUTCOMES.get(usage.reason),
        tokens=usage.completion_tokens,
    )


def in_order(some: Iterable[Moment]) -> list[Moment]:
    """By time; what was told in the same millisecond as a choice was known to it."""
    return sorted(some, key=lambda moment: (moment.at_ms, isinstance(moment.what, Sent)))


def replay(
    told: Iterable[Moment],
    region: str,
    *,
    block_tokens: int = BLOCK_TOKENS,
    trips_ms: Mapping[str, float] = NOWHERE,
    wanted: Callable[[Dispatch], bool] = lambda dispatch: True,
) -> Iterator[Decision]:
    """The choices of a region's ingresses, as far as they are wanted; the others only go onto the boards.

    `told`: in order of time. `trips_ms`: as the ingresses have them. A dispatch that doesn't say why isn't weighed.
    """
    models: dict[str, _Model] = {}
    for at_ms, what in told:
        name = what.dispatch.model if isinstance(what, Sent) else what.model
        model = models.get(name)
        if model is None:
            model = models[name] = _Model(region, Board(block_tokens=block_tokens, trips_ms=trips_ms))
        match what:
            case EngineSignal():
                model.heard(what)
            case Snapshot():
                model.published(what)
            case Ended():
                model.ended(what, at_ms)
            case _:
                if what.dispatch.request_id and wanted(what.dispatch):
                    yield model.weighed(what, at_ms)
                model.sent(what.dispatch, at_ms)


class _Model:
    """What the log knows of one model."""

    def __init__(self, region: str, board: Board) -> None:
        self._region = region
        self._board = board
        self._policy = Policy(board)
        self._snapshots: dict[int, Snapshot] = {}
        """by version, the latest last"""
        self._named: dict[Version, tuple[Candidate, ...]] = {}
        self._engines: dict[Candidate, str] = {}
        self._open: deque[tuple[float, Name]] = deque()

    def heard(self, signal: EngineSignal) -> None:
        """An engine's signal."""
        if signal.shards:
            self._name(Candidate(signal.fleet, signal.shards[0]), signal.engine)
        self._board.heard(signal)

    def published(self, snapshot: Snapshot) -> None:
        """Another snapshot; those of other regions and unusable ones are left out, as an ingress does."""
        if snapshot.region != self._region:
            return
        try:
            check(snapshot)
        except BadSnapshot:
            return
        for route in snapshot.routes:
            self._name(Candidate(route.fleet, route.shard), route.engine)
        self._snapshots[snapshot.version] = snapshot
        if len(self._snapshots) > SNAPSHOTS:
            del self._snapshots[next(iter(self._snapshots))]
        self._policy.follow(snapshot)

    def sent(self, dispatch: Dispatch, at_ms: float) -> None:
        """A request went somewhere."""
        if not dispatch.request_id:
            self._board.told((dispatch,), at_ms)
            return
        name = (dispatch.request_id, dispatch.attempt)
        to, tokens = (dispatch.fleet, dispatch.shard), dispatch.prompt_tokens_estimate
        self._board.sent(name, to, tokens, dispatch.prefix_chain, at_ms)
        self._open.append((at_ms, name))
        while self._open[0][0] < at_ms - OPEN_MS:
            self._board.ended(self._open.popleft()[1])

    def ended(self, ended: Ended, at_ms: float) -> None:
        """An attempt is over."""
        self._board.ended(ended.name, ended.outcome, at_ms)
        if ended.outcome == "answered":
            self._board.lengths.add(ended.tokens)

    def weighed(self, sent: Sent, at_ms: float) -> Decision:
        """The choice made again."""
        dispatch = sent.dispatch
        query = self._query(dispatch)
        tried = frozenset(Candidate(*shard) for shard in dispatch.tried)
        offers = self._policy.offers(query, at_ms, tried)
        version = dispatch.snapshot_version
        return Decision(
            at_ms=at_ms,
            ingress=sent.ingress,
            dispatch=dispatch,
            followed=None if version is None else self._snapshots.get(version),
            again=self._policy.choose(query, at_ms, tried) if offers else None,
            offers=offers,
            engines={offer.candidate: self._engines[offer.candidate] for offer in offers},
            regret=regret(offers, Candidate(dispatch.fleet, dispatch.shard)),
        )

    def _query(self, dispatch: Dispatch) -> Query:
        fleet = dispatch.fleet
        return Query(
            request_id=dispatch.request_id,
            model=dispatch.model,
            candidates=self._named.get((fleet.slug, fleet.version, fleet.numerics), ()),
            prompt_tokens=max(dispatch.prompt_tokens_estimate, 1),
            prefix_chain=dispatch.prefix_chain,
            residency=dispatch.residency,
            home=self._region,
            features=frozenset(dispatch.features),
            waited_ms=float(dispatch.waited_ms),
        )

    def _name(self, shard: Candidate, engine: str) -> None:
        """One more that requests of its version could go to. In order, as the ingresses have them: draws go by it."""
        self._engines[shard] = engine
        version = (shard.fleet.slug, shard.fleet.version, shard.fleet.numerics)
        named = self._named.get(version, ())
        if shard not in named:
            self._named[version] = tuple(sorted((*named, shard)))


def regret(offers: Iterable[Offer], chosen: Candidate) -> float | None:
    """The loss expected where a request went, less the least of those that were able; None if that isn't known."""
    offers = tuple(offers)
    there = [offer.loss for offer in offers if offer.candidate == chosen]
    if not there:
        return None
    return max(there[0] - min(offer.loss for offer in offers if offer.able), 0.0)
