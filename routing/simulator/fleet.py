"""A fleet in virtual time: requests come to ingresses, go to engines, and end; signals and faults happen meanwhile."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from routing.simulator.conditions import Conditions, Crash, Fault, Slow
from routing.simulator.engine import Engine
from routing.simulator.flight import Flight, Outcome
from routing.simulator.ingress import Ingress
from routing.simulator.sequence import UNKNOWN
from routing.simulator.sequence import Sequence as Running
from routing.simulator.signals import Index, Sent, Signal, take
from routing.simulator.trace import Arrival

NOTICE_MS = 100.0
"""How often an ingress looks after requests that nothing is heard of"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What an ingress is made of."""

    number: int
    region: str
    conditions: Conditions
    engines: Sequence[Engine]
    """to read, where `indexes` is None"""
    indexes: Sequence[Index] | None
    """one an engine, kept up to date for all; None: there are no signals"""


MakeIngress = Callable[[Seat], Ingress]


class Fleet:
    """One run."""

    def __init__(self, conditions: Conditions, make: MakeIngress) -> None:
        self._conditions = conditions
        self.engines = [Engine(n, timing, conditions.rule) for n, timing in enumerate(conditions.timings)]
        self._indexes = [Index() for _ in self.engines] if conditions.signal_ms else None
        self._make = make
        self.ingresses: list[Ingress] = []
        self._by_region: dict[str, list[int]] = {}
        self._region: list[str] = []
        self._lives = [1] * len(self.engines)
        """0 while dead"""
        self._births = [1] * len(self.engines)
        self._cut: set[str] = set()
        self._flights: dict[int, Flight] = {}
        self._orphans: dict[int, Flight] = {}
        """sent to an engine that is dead or out of reach"""
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._told: deque[Sent] = deque()
        """sends that siblings don't know yet"""
        self._draw = Random(conditions.seed)
        self.outcome = Outcome(conditions.timings, [], [[] for _ in self.engines], [])

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Every request to its end. They come in order of time."""
        self._schedule()
        now_ms = 0.0
        for arrival in arrivals:
            now_ms = arrival.at_ms
            self._until(now_ms)
            self._arrive(arrival, now_ms)
        self.outcome.ends_ms = now_ms
        self._until(now_ms + self._conditions.patience_ms)
        self._pass(math.inf)
        self.outcome.failed += len(self._orphans)
        return self.outcome

    def _schedule(self) -> None:
        conditions = self._conditions
        for number, engine in enumerate(self.engines):
            if conditions.signal_ms:
                engine.cache.changed = {}
                self._at(conditions.signal_ms * number / len(self.engines), self._signal, engine)
        for fault in conditions.faults:
            self._at(fault.at_ms, self._strike, fault)
            self._at(fault.until_ms, self._mend, fault)

    def _at(self, at_ms: float, do: Callable[..., None], *what: object) -> None:
        heappush(self._events, (at_ms, next(self._order), do, what))

    def _until(self, now_ms: float) -> None:
        """Everything that happens up to now."""
        while self._events and self._events[0][0] <= now_ms:
            at_ms, _, do, what = heappop(self._events)
            self._pass(at_ms)
            do(at_ms, *what)
        self._pass(now_ms)

    def _pass(self, now_ms: float) -> None:
        live = self._indexes is None
        for engine in self.engines:
            engine.advance(now_ms)
            if live and now_ms < math.inf:
                engine.sync(now_ms)
            if engine.done:
                self._done(engine)
        self._follow(now_ms)

    def _done(self, engine: Engine) -> None:
        for running in engine.done:
            flight = self._flights.get(running.arrival.number)
            if flight is not None and flight.running is running and running.arrival.number not in self._orphans:
                self._answered(flight, running)
        engine.done.clear()

    def _answered(self, flight: Flight, running: Running, not_before_ms: float = 0.0) -> None:
        """Its client has all of the answer."""
        back_ms = self._way_ms(flight)
        running.first_token_ms = max(running.first_token_ms + back_ms, not_before_ms)
        running.finished_ms = max(running.finished_ms + back_ms, not_before_ms)
        del self._flights[running.arrival.number]
        self.ingresses[flight.ingress].ended(running, flight.attempts)
        self.outcome.ended.append(running)
        self.outcome.by_engine[flight.engine].append(running)

    def _follow(self, now_ms: float) -> None:
        lag_ms = self._conditions.follow_ms
        while lag_ms is not None and self._told and self._told[0].at_ms + lag_ms <= now_ms:
            sent = self._told.popleft()
            for number in self._by_region[self._region[sent.ingress]]:
                if number != sent.ingress:
                    self.ingresses[number].sent(sent)

    def _arrive(self, arrival: Arrival, now_ms: float) -> None:
        numbers = self._by_region.get(arrival.region) or self._seat(arrival.region)
        ingress = numbers[self._draw.randrange(len(numbers))] if len(numbers) > 1 else numbers[0]
        self._send(Flight(arrival, ingress), now_ms)

    def _seat(self, region: str) -> list[int]:
        """The ingresses of a region, when its first request comes."""
        numbers = [len(self.ingresses) + more for more in range(self._conditions.ingresses)]
        self._by_region[region] = numbers
        for number in numbers:
            seat = Seat(
                number=number,
                region=region,
                conditions=self._conditions,
                engines=self.engines,
                indexes=self._indexes,
            )
            self.ingresses.append(self._make(seat))
            self._region.append(region)
        return numbers

    def _send(self, flight: Flight, now_ms: float) -> None:
        ingress = self.ingresses[flight.ingress]
        engine = ingress.choose(flight.arrival, now_ms, flight.tried)
        if engine is None:
            self._flights.pop(flight.arrival.number, None)
            self.outcome.shed += 1
            return
        flight.engine, flight.running = engine, None
        flight.attempts += 1
        self._flights[flight.arrival.number] = flight
        self.outcome.sends.append((now_ms, engine))
        sent = Sent(
            arrival=flight.arrival, engine=engine, ingress=flight.ingress, attempt=flight.attempts, at_ms=now_ms
        )
        ingress.sent(sent)
        if self._conditions.follow_ms is not None:
            self._told.append(sent)
        way_ms = self._way_ms(flight)
        if way_ms:
            self._at(now_ms + way_ms, self._reach, flight)
        else:
            self._reach(now_ms, flight)

    def _reach(self, now_ms: float, flight: Flight) -> None:
        """A request comes to its engine, or to nothing."""
        if self._lives[flight.engine] and self._reachable(flight):
            flight.running = self.engines[flight.engine].add(flight.arrival, now_ms)
        else:
            self._orphan(now_ms, flight)

    def _way_ms(self, flight: Flight) -> float:
        return self._conditions.one_way_ms(self._region[flight.ingress], self._conditions.region(flight.engine))

    def _reachable(self, flight: Flight) -> bool:
        here, there = self._region[flight.ingress], self._conditions.region(flight.engine)
        return here == there or not self._cut or not self._cut & {here, there}

    def _orphan(self, now_ms: float, flight: Flight) -> None:
        if not self._orphans:
            self._at(now_ms + NOTICE_MS, self._notice)
        self._orphans[flight.arrival.number] = flight

    def _notice(self, now_ms: float) -> None:
        """Ingresses give up on engines they take for dead. What a client has seen a part of has failed then; what it
        has seen nothing of may go elsewhere."""
        for number, flight in list(self._orphans.items()):
            ingress = self.ingresses[flight.ingress]
            noticed = flight.engine in ingress.silent(now_ms)
            if not noticed and now_ms - flight.arrival.at_ms <= self._conditions.patience_ms:
                continue
            del self._orphans[number]
            ingress.lost(flight.arrival, flight.attempts, flight.engine, now_ms)
            if noticed and not flight.delivered and ingress.may_retry(now_ms):
                flight.tried |= {flight.engine}
                self._send(flight, now_ms)
            else:
                del self._flights[number]
                self.outcome.failed += 1
        if self._orphans:
            self._at(now_ms + NOTICE_MS, self._notice)

    def _signal(self, now_ms: float, engine: Engine) -> None:
        self._at(now_ms + self._conditions.signal_ms, self._signal, engine)
        life = self._lives[engine.number]
        if not life or self._indexes is None:
            return
        signal: Signal = take(engine, now_ms, life)
        self._indexes[engine.number].hear(signal)
        there = self._conditions.region(engine.number)
        for number, ingress in enumerate(self.ingresses):
            here = self._region[number]
            if here == there or not self._cut & {here, there}:
                ingress.hear(signal)

    def _strike(self, now_ms: float, fault: Fault) -> None:
        match fault:
            case Crash():
                self._lives[fault.engine] = 0
                for running in self.engines[fault.engine].halt():
                    self._orphan(now_ms, self._flights[running.arrival.number])
            case Slow():
                self.engines[fault.engine].change(1 / fault.factor, now_ms)
            case _:
                self._cut.add(fault.region)
                for flight in list(self._flights.values()):
                    if flight.arrival.number not in self._orphans and not self._reachable(flight):
                        self._orphan(now_ms, flight)

    def _mend(self, now_ms: float, fault: Fault) -> None:
        match fault:
            case Crash():
                self._revive(now_ms, fault.engine)
            case Slow():
                self.engines[fault.engine].change(fault.factor, now_ms)
            case _:
                self._cut.discard(fault.region)
                for number, flight in list(self._orphans.items()):
                    if self._lives[flight.engine] and self._reachable(flight):
                        del self._orphans[number]
                        self._found(now_ms, flight)

    def _found(self, now_ms: float, flight: Flight) -> None:
        """A request that was out of reach: it never got there, is still computed, or has been answered."""
        if flight.running is None:
            self._reach(now_ms, flight)
        elif flight.running.finished_ms != UNKNOWN:
            self._answered(flight, flight.running, now_ms)

    def _revive(self, now_ms: float, number: int) -> None:
        """An engine is back, and takes up what it had and nobody has seen anything of: its requests are in the log."""
        self._births[number] += 1
        self._lives[number] = self._births[number]
        self.engines[number].cache.changed = {} if self._indexes is not None else None
        for flight in [flight for flight in self._orphans.values() if flight.engine == number]:
            if not flight.delivered:
                del self._orphans[flight.arrival.number]
                flight.running = self.engines[number].add(flight.arrival, now_ms)
