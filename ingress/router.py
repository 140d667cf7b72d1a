"""Where a request goes: what is known of engines and weights, put to `routing.policy`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ingress.dispatches import Decided, dispatch
from ingress.endings import NATURAL, shed
from ingress.life import Target
from ingress.metrics import Metrics
from routing.board import Board
from routing.budget import RetryBudget, ratio_at
from routing.errors import BadSnapshot
from routing.penalties import Outcome
from routing.policy import Choice, Policy, Query, check
from routing.prefix import BLOCK_TOKENS, CHARS_PER_TOKEN
from routing.shed import Gate
from wire.bus import Record
from wire.clock import Clock
from wire.messages import DemandSignal, Dispatch, Dispatches, End, EngineSignal, Refused, Request, Snapshot

log = logging.getLogger(__name__)
ENGINE_HEARD_MS = 10_000
"""a ready engine not heard for longer is no reason to say that this ingress is ready"""


class Weights:
    """The snapshots of this region, by model; unusable ones are left out."""

    def __init__(self, region: str) -> None:
        self._prefix = f"{region}/"
        self._snapshots: dict[str, Snapshot] = {}

    def changed(self, key: str, snapshot: Snapshot | None) -> None:
        """Take a change of the weights topic."""
        if not key.startswith(self._prefix):
            return
        model = key.removeprefix(self._prefix)
        if snapshot is None:
            self._snapshots.pop(model, None)
            return
        try:
            check(snapshot)
        except BadSnapshot as exc:
            log.warning("%s; the one before it stays in use", exc)
            return
        self._snapshots[model] = snapshot

    @property
    def snapshots(self) -> Mapping[str, Snapshot]:
        return self._snapshots


class Router:
    """Chooses targets, and knows what was sent: by this ingress, and by the others of its region."""

    def __init__(
        self,
        weights: Weights,
        incarnation: str,
        metrics: Metrics,
        clock: Clock,
        trips_ms: Mapping[str, float],
        policy: type[Policy] = Policy,
        gate: Callable[[], Gate] = Gate,
    ) -> None:
        """`incarnation`: this ingress's, whose own dispatches are known already. `trips_ms`: to other regions.
        `gate`: makes a model's."""
        self._new_gate = gate
        self._policy = policy
        self._weights = weights
        self._incarnation = incarnation
        self._metrics = metrics
        self._clock = clock
        self._trips_ms = trips_ms
        self._policies: dict[str, Policy] = {}
        self._gates: dict[str, Gate] = {}
        self._heard_ms: float = -ENGINE_HEARD_MS
        """when a ready engine measured its latest signal"""
        self._budget = RetryBudget(now_ms=clock.monotonic_ms())
        self._priced: Snapshot | None = None
        """the snapshot that the budget was tightened by"""
        self._decided: Decided | None = None
        """the latest: a request is sent before another one is decided"""

    def heard(self, signal: EngineSignal | DemandSignal, record: Record) -> None:
        """Take a record of the signals topic."""
        if not isinstance(signal, EngineSignal):
            return
        self.policy(signal.model).board.heard(signal)
        if signal.state == "ready" and signal.shards:
            self._heard_ms = max(self._heard_ms, signal.at_ms)

    def told(self, message: Dispatches, record: Record) -> None:
        """Take a record of the dispatches topic; one's own are skipped."""
        if message.incarnation != self._incarnation:
            for dispatch in message.sent:
                self.policy(dispatch.model).board.told((dispatch,), message.at_ms)

    def first(self, request: Request, candidates: tuple[Target, ...]) -> Target | None:
        """The first attempt's target. ApiError 503 if the snapshot says to shed this request."""
        snapshot = self._weights.snapshots.get(request.model)
        if snapshot is not None:
            self._tighten(snapshot)
        choice = self._weigh(request, candidates, frozenset())
        if choice is None:
            return None
        share = snapshot.shed.get(str(request.priority), 0.0) if snapshot is not None else 0.0
        if self._gate(request.model).refuses(request.priority, share, choice, self._clock.monotonic_ms()):
            self._metrics.shed.labels(request.model).inc()
            raise shed()
        self._budget.first_attempt(self._clock.monotonic_ms())
        return self._chosen(request, choice)

    def elsewhere(self, request: Request, candidates: tuple[Target, ...], tried: frozenset[Target]) -> Target | None:
        """Another target than those tried, if there is one and the retry budget allows it."""
        if tried.issuperset(candidates):
            return None
        # The budget before the choice: when an engine dies hundreds ask at once, and most are refused.
        if not self._budget.try_retry(self._clock.monotonic_ms()):
            self._metrics.retries_refused.inc()
            return None
        choice = self._weigh(request, candidates, tried)
        if choice is None:
            return None
        self._metrics.retries.inc()
        return self._chosen(request, choice)

    def silent(self, model: str, candidates: tuple[Target, ...]) -> frozenset[Target]:
        """Those whose engine gets nothing any more, since it fell silent while others were heard."""
        return self.policy(model).silent(candidates)

    def sent(self, request: Request, attempt: int, target: Target) -> Dispatch:
        """An attempt was sent; returns what there is to tell of it."""
        name, tokens = (request.request_id, attempt), estimated_tokens(request)
        self.policy(request.model).board.sent(name, target, tokens, request.prefix_chain, self._clock.now_ms())
        return dispatch(request, attempt, target, tokens, self._decided)

    def ended(self, request: Request, attempt: int, outcome: Outcome | None = None) -> None:
        """An attempt is over, once or again; the first time its outcome counts."""
        self.policy(request.model).board.ended((request.request_id, attempt), outcome, self._clock.now_ms())

    def told_of(self, request: Request, entry: Refused | End) -> None:
        """An owner says that an attempt is over."""
        self.ended(request, entry.attempt, outcome_of(entry))
        if isinstance(entry, End) and entry.reason in NATURAL:
            for tokens in entry.tokens:
                self.policy(request.model).board.lengths.add(tokens)

    def engine_known(self) -> bool:
        """Whether any engine is known that could serve: a fresh signal of a ready one, or a route."""
        oldest_ms = self._clock.now_ms() - ENGINE_HEARD_MS
        return self._heard_ms >= oldest_ms or any(
            snapshot.routes and snapshot.created_ms >= oldest_ms for snapshot in self._weights.snapshots.values()
        )

    def policy(self, model: str) -> Policy:
        """A model's policy, with its board."""
        policy = self._policies.get(model)
        if policy is None:
            board = Board(block_tokens=BLOCK_TOKENS, trips_ms=self._trips_ms)
            policy = self._policies[model] = self._policy(board)
        return policy

    def _gate(self, model: str) -> Gate:
        gate = self._gates.get(model)
        if gate is None:
            gate = self._gates[model] = self._new_gate()
        return gate

    def _tighten(self, snapshot: Snapshot) -> None:
        """The retries that there may be, by the latest prices: one budget, whatever the model."""
        if snapshot is not self._priced:
            self._priced = snapshot
            prices = snapshot.shadow_prices
            refusing = any(share > 0 for share in snapshot.shed.values())
            ratio = ratio_at(prices.get("latency_ms"), prices.get("request_ms"), refusing=refusing)
            self._budget.tighten(ratio)

    def _weigh(self, request: Request, candidates: tuple[Target, ...], tried: frozenset[Target]) -> Choice | None:
        policy, now_ms = self.policy(request.model), self._clock.now_ms()
        snapshot = self._weights.snapshots.get(request.model)
        policy.follow(snapshot)
        asked = query(request, candidates, now_ms)
        choice = policy.choose(asked, now_ms, tried)
        if choice is not None:
            self._decided = Decided(query=asked, choice=choice, at_ms=now_ms, snapshot=snapshot, tried=tried)
        return choice

    def _chosen(self, request: Request, choice: Choice) -> Target:
        metrics = self._metrics
        metrics.choices.labels(request.model, choice.reason).inc()
        metrics.expected_loss.labels(request.model).observe(choice.loss)
        metrics.affine_tokens.labels(request.model).inc(choice.cached_tokens)
        metrics.routed_tokens.labels(request.model).inc(estimated_tokens(request))
        return Target(choice.fleet, choice.shard)


def query(request: Request, candidates: tuple[Target, ...], now_ms: int) -> Query:
    """What the policy needs to know of a request."""
    body = request.body
    wanted = {"tools": body.tools, "response_format": body.response_format, "logprobs": body.logprobs is not None}
    return Query(
        request_id=request.request_id,
        model=request.model,
        candidates=candidates,
        prompt_tokens=max(estimated_tokens(request), 1),
        prefix_chain=request.prefix_chain,
        residency=request.residency,
        home=request.reply.region,
        features=frozenset(name for name, wants in wanted.items() if wants),
        waited_ms=float(max(now_ms - request.created_ms, 0)),
    )


def estimated_tokens(request: Request) -> int:
    """A prompt's length before anybody has tokenised it."""
    body = request.body
    if body.prompt is not None:
        return len(body.prompt) // CHARS_PER_TOKEN if isinstance(body.prompt, str) else len(body.prompt)
    return sum(len(message.get("content") or "") for message in body.messages) // CHARS_PER_TOKEN


def outcome_of(entry: Refused | End) -> Outcome | None:
    """What an ending says of the engine; None for one that says nothing: a cancelled or expired attempt's."""
    if isinstance(entry, Refused):
        if entry.status in (429, 503):
            return "overloaded"
        return "client_error" if entry.status < 500 else "failed"
    return "answered" if entry.reason in NATURAL else "failed" if entry.reason == "error" else None
