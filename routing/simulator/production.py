"""An ingress as it is in production: `routing.policy` on a `routing.board`, told by messages what engines do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from routing.board import Board, Candidate
from routing.budget import RetryBudget, ratio_at
from routing.earlier import EarlierPolicy, Feedback
from routing.policy import SILENT_MS, Choice, Policy, Query
from routing.shed import PROMISED_LOSS, Gate
from routing.simulator.conditions import Conditions
from routing.simulator.control import MODEL, PATIENCE_MS, Control, fleet_of, name_of
from routing.simulator.engine import SLOTS
from routing.simulator.fleet import Seat
from routing.simulator.ingress import Ingress
from routing.simulator.sequence import Sequence
from routing.simulator.signals import Sent, Signal
from routing.simulator.timing import BLOCK_TOKENS, CHUNK_TOKENS, LINEAR_MS, SQUARE_MS, STEP_MS
from routing.simulator.trace import PREFIX_TOKENS, Arrival
from routing.sketch import Recorder
from wire.messages import Dispatch, EngineSignal, Sketch, Snapshot, StepCost

_PART = 64
"""The slope of the decode time is taken over this part of the cache"""


def message(signal: Signal, before: Signal | None, conditions: Conditions) -> EngineSignal:
    """A simulated engine's signal as it is on the wire. `before`: the one before it in the same life."""
    timing = signal.timing
    was = before or replace(signal, computed_tokens=0, prefill_ms=0.0, generated_tokens=0, token_ms=0.0, ended=0)
    tokens = signal.generated_tokens - was.generated_tokens
    decode_ms, more = timing.decode_ms(signal.kv_tokens), timing.kv_tokens // _PART
    return EngineSignal(
        engine=f"engine-{signal.engine}",
        incarnation=str(signal.life),
        fleet=fleet_of(conditions.region(signal.engine)),
        shards=(signal.engine,),
        state="ready",
        model=MODEL,
        fingerprint=None,
        at_ms=round(signal.at_ms),
        queued_requests=signal.waiting,
        queued_tokens=signal.backlog_tokens,
        running=signal.decoding,
        slots=SLOTS,
        kv_used_tokens=signal.used_blocks * BLOCK_TOKENS,
        kv_total_tokens=timing.kv_tokens,
        prefill_tokens_per_s=_per_s(signal.computed_tokens - was.computed_tokens, signal.prefill_ms - was.prefill_ms),
        step=StepCost(
            prefill_fixed_ms=STEP_MS / timing.prefill_speed,
            prefill_token_ms=LINEAR_MS / timing.prefill_speed,
            prefill_square_ms=SQUARE_MS / timing.prefill_speed,
            piece_tokens=CHUNK_TOKENS,
            decode_ms=decode_ms,
            decode_token_ms=(timing.decode_ms(signal.kv_tokens + more) - decode_ms) / more,
        ),
        slacks_ms=signal.slacks_ms,
        ttft=_sketch((ms, 1) for ms in signal.ttfts_ms),
        tbt=_sketch([((signal.token_ms - was.token_ms) / tokens, tokens)] if tokens else ()),
        finished=signal.ended - was.ended,
        context_tokens=timing.kv_tokens,
        prefixes_added=signal.added,
        prefixes_evicted=signal.evicted,
    )


def _per_s(tokens: int, ms: float) -> float | None:
    return tokens * 1_000 / ms if tokens and ms > 0 else None


def _sketch(values: Iterable[tuple[float, int]]) -> Sketch:
    recorder = Recorder()
    for ms, times in values:
        recorder.add(ms, times)
    return recorder.take()


class Production:
    """Makes ingresses, for one run. What they have in common is the log: messages, and what control publishes.

    `earlier`: of the earlier design (`routing.earlier`), at the ingresses and in control. `refuses`: whether requests
    are refused at all.
    """

    def __init__(self, *, earlier: bool = False, refuses: bool = True) -> None:
        self.earlier = earlier
        self.refuses = refuses
        self._latest: dict[int, tuple[Signal, EngineSignal]] = {}
        self._control: Control | None = None

    def __call__(self, seat: Seat) -> Ingress:
        if self._control is None:
            self._control = Control(seat.conditions, Feedback() if self.earlier else None)
        self._control.serve(seat.region)
        return ProductionIngress(seat, self, self._control)

    def message(self, signal: Signal, conditions: Conditions, control: Control) -> EngineSignal:
        """The signal as a message, made once however many read it; control reads it, too."""
        known = self._latest.get(signal.engine)
        if known is None or known[0] is not signal:
            before = known[0] if known is not None and known[0].life == signal.life else None
            known = self._latest[signal.engine] = signal, message(signal, before, conditions)
            control.hear(known[1])
        return known[1]


class ProductionIngress(Ingress):
    """The production policy, with a board and a retry budget of its own."""

    def __init__(self, seat: Seat, production: Production, control: Control) -> None:
        conditions = seat.conditions
        self._number, self._region = seat.number, name_of(seat.region)
        self._production, self._control, self._conditions = production, control, conditions
        self._candidates = tuple(
            Candidate(fleet_of(conditions.region(number)), number) for number in range(len(seat.engines))
        )
        places = {fleet.region for fleet, _ in self._candidates}
        trips_ms = {there: control.trip_ms(self._region, there) for there in places}
        self.board = Board(block_tokens=PREFIX_TOKENS, trips_ms=trips_ms)
        self.policy = EarlierPolicy(self.board) if production.earlier else Policy(self.board)
        self._rows = self.board.rows(self._candidates)
        self._budget = RetryBudget()
        self._gate = Gate(PATIENCE_MS, PROMISED_LOSS)
        self._snapshot: Snapshot | None = None

    def choose(self, arrival: Arrival, now_ms: float, tried: frozenset[int]) -> int | None:
        self._follow(now_ms)
        if not tried:
            self._control.asked(self._region, arrival)
            self._budget.first_attempt(now_ms)
        query = Query(
            request_id=str(arrival.number),
            model=MODEL,
            candidates=self._candidates,
            prompt_tokens=arrival.prompt_tokens,
            prefix_chain=arrival.prefix,
            waited_ms=now_ms - arrival.at_ms,
        )
        choice = self.policy.choose(query, now_ms, frozenset(self._candidates[number] for number in tried))
        if choice is None or (not tried and self._sheds(arrival, choice, now_ms)):
            return None
        return choice.shard

    def hear(self, signal: Signal) -> None:
        self.board.heard(self._production.message(signal, self._conditions, self._control))

    def sent(self, sent: Sent) -> None:
        arrival, (fleet, shard) = sent.arrival, self._candidates[sent.engine]
        if sent.ingress == self._number:
            name = (str(arrival.number), sent.attempt)
            self.board.sent(name, (fleet, shard), arrival.prompt_tokens, arrival.prefix, sent.at_ms)
        else:
            told = Dispatch(
                model=MODEL,
                fleet=fleet,
                shard=shard,
                prompt_tokens_estimate=arrival.prompt_tokens,
                prefix_chain=arrival.prefix,
            )
            self.board.told((told,), sent.at_ms)

    def ended(self, running: Sequence, attempt: int) -> None:
        self.board.ended((str(running.arrival.number), attempt), "answered", running.finished_ms)
        self.board.lengths.add(running.arrival.output_tokens)
        self._control.answered(running.arrival.output_tokens)

    def lost(self, arrival: Arrival, attempt: int, engine: int, now_ms: float) -> None:
        self.board.ended((str(arrival.number), attempt), "timed_out", now_ms)

    def may_retry(self, now_ms: float) -> bool:
        return self._budget.try_retry(now_ms)

    def silent(self, now_ms: float) -> frozenset[int]:
        living = self.board.living(self._rows, SILENT_MS)
        return frozenset((~living).nonzero()[0].tolist())

    def _sheds(self, arrival: Arrival, choice: Choice, now_ms: float) -> bool:
        """As `ingress.router`."""
        if not self._production.refuses:
            return False
        share = self._snapshot.shed.get(str(arrival.priority), 0.0) if self._snapshot is not None else 0.0
        return self._gate.refuses(arrival.priority, share, choice, now_ms)

    def _follow(self, now_ms: float) -> None:
        snapshot = self._control.snapshot(self._region, now_ms)
        if snapshot is None or snapshot is self._snapshot:
            return
        self._snapshot = snapshot
        self.policy.follow(snapshot)
        prices, refusing = snapshot.shadow_prices, any(share > 0 for share in snapshot.shed.values())
        self._budget.tighten(ratio_at(prices.get("latency_ms"), prices.get("request_ms"), refusing=refusing))
