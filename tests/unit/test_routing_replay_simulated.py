"""Runs of the simulator, replayed: who knew what the log knew regrets next to nothing; who didn't, more."""

from __future__ import annotations

from dataclasses import dataclass, field

from routing.hindsight import Hindsight, hindsight
from routing.replay import Ended, Moment, Sent, replay
from routing.scales import TIE
from routing.simulator.conditions import Conditions
from routing.simulator.control import MODEL, Control
from routing.simulator.fleet import Seat
from routing.simulator.generated import Traffic, generate
from routing.simulator.production import Production, ProductionIngress
from routing.simulator.run import run
from routing.simulator.sequence import Sequence
from routing.simulator.signals import Signal
from routing.simulator.timing import COLD
from routing.simulator.trace import PREFIX_TOKENS, Arrival
from wire.messages import Dispatch, EngineSignal, Snapshot


@dataclass
class Log:
    """What the ingresses of a run would have written and read, in order."""

    moments: list[Moment] = field(default_factory=list)
    latest: object = None

    def tell(self, at_ms: float, what: EngineSignal | Snapshot | Ended | Sent) -> None:
        self.moments.append(Moment(at_ms, what))


class Written(Production):
    """Production, whose messages are kept."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __call__(self, seat: Seat) -> ProductionIngress:
        super().__call__(seat)
        assert self._control is not None
        return WrittenIngress(seat, self, self._control)

    def message(self, signal: Signal, conditions: Conditions, control: Control) -> EngineSignal:
        before = self._latest.get(signal.engine)
        told = super().message(signal, conditions, control)
        if before is None or before[0] is not signal:
            self.log.tell(signal.at_ms, told)
        return told


class WrittenIngress(ProductionIngress):
    """An ingress whose choices are kept, too."""

    _production: Written

    def choose(self, arrival: Arrival, now_ms: float, tried: frozenset[int]) -> int | None:
        log = self._production.log
        self._follow(now_ms)
        if self._snapshot is not None and self._snapshot is not log.latest:
            log.latest = self._snapshot
            log.tell(now_ms, self._snapshot)
        engine = super().choose(arrival, now_ms, tried)
        if engine is not None:
            fleet, shard = self._candidates[engine]
            dispatch = Dispatch(
                model=MODEL,
                fleet=fleet,
                shard=shard,
                prompt_tokens_estimate=arrival.prompt_tokens,
                prefix_chain=arrival.prefix,
                request_id=str(arrival.number),
                at_ms=round(now_ms),
                reason="loss",
                snapshot_version=None if self._snapshot is None else self._snapshot.version,
                waited_ms=round(now_ms - arrival.at_ms),
            )
            log.tell(now_ms, Sent(ingress=str(self._number), dispatch=dispatch))
        return engine

    def ended(self, running: Sequence, attempt: int) -> None:
        super().ended(running, attempt)
        arrival = running.arrival
        over = Ended(model=MODEL, name=(str(arrival.number), 1), outcome="answered", tokens=arrival.output_tokens)
        self._production.log.tell(running.finished_ms, over)


def warm(dispatch: Dispatch) -> bool:
    """Whether the engines had been heard for a while."""
    return (dispatch.at_ms or 0) >= 20_000


def in_hindsight(conditions: Conditions) -> Hindsight:
    log = Log()
    run(generate(120, traffic=Traffic(sessions_per_s=2.0)), Written(log), conditions)
    (found,) = hindsight(replay(log.moments, "here", block_tokens=PREFIX_TOKENS, wanted=warm))
    assert found.weighed == found.decisions > 400
    return found


def regret_of(found: Hindsight) -> float:
    assert found.regret_mean is not None
    return found.regret_mean


def test_an_ingress_that_knows_all_chooses_as_a_replay_does() -> None:
    found = in_hindsight(Conditions(timings=(COLD,) * 8, signal_ms=250.0))
    assert found.alike is not None
    assert found.alike > 0.99
    assert found.regret_worst is not None
    assert found.regret_worst <= TIE, "of equal losses one is drawn"


def test_sixteen_that_are_not_told_of_one_another_regret_it() -> None:
    untold = in_hindsight(Conditions(timings=(COLD,) * 8, signal_ms=1_000.0, ingresses=16))
    told = in_hindsight(Conditions(timings=(COLD,) * 8, signal_ms=1_000.0, ingresses=16, follow_ms=20.0))
    assert 3 * regret_of(told) < regret_of(untold), "told, an ingress still misses the others' endings"
    assert regret_of(told) < 0.002
