"""A fleet in virtual time: what ingresses see, and what becomes of requests when engines die or slow down."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from routing.shares import swing
from routing.simulator.conditions import Conditions, Crash, CutOff, Slow
from routing.simulator.fleet import Fleet, Seat
from routing.simulator.flight import Outcome
from routing.simulator.generated import Traffic, generate
from routing.simulator.ingress import Ingress, PeerIngress
from routing.simulator.peers.load import LeastLoad, RoundRobin
from routing.simulator.policy import Policy
from routing.simulator.report import report, shares
from routing.simulator.run import run, simulate
from routing.simulator.signals import Index, Seen, Sent, Signal, take
from routing.simulator.timing import COLD, Timing
from routing.simulator.trace import Arrival


def steady(requests: int, every_ms: float, *, prompt: int = 640, output: int = 50, region: str = "") -> list[Arrival]:
    """Requests of a kind, none like another."""
    fresh = count()
    return [
        Arrival(
            number=number,
            at_ms=number * every_ms,
            prompt_tokens=prompt,
            output_tokens=output,
            prefix=tuple(next(fresh) for _ in range(-(-prompt // 512))),
            region=region,
        )
        for number in range(requests)
    ]


def outcome(arrivals: list[Arrival], policy: Policy, conditions: Conditions) -> Outcome:
    return run(arrivals, lambda seat: PeerIngress(policy, seat.engines, seat.indexes), conditions)


def test_every_request_ends_and_the_same_run_is_the_same() -> None:
    arrivals = generate(200, traffic=Traffic(sessions_per_s=2.0))
    conditions = Conditions(
        signal_ms=500, ingresses=4, follow_ms=20.0, faults=(Crash(engine=1, at_ms=5e4, until_ms=9e4),)
    )
    first, second = (simulate(arrivals, LeastLoad(), conditions) for _ in range(2))
    assert first == second
    assert first.requests == len(arrivals)


def test_an_ingress_that_sees_everything_spreads_by_what_is() -> None:
    sends = outcome(steady(100, 30.0), LeastLoad(), Conditions(timings=(COLD,) * 4)).sends
    assert max(Counter(engine for _, engine in sends).values()) <= 35


def test_ingresses_that_see_the_same_old_signals_herd_and_those_that_follow_one_another_do_not() -> None:
    def busiest(follow_ms: float | None) -> int:
        conditions = Conditions(timings=(COLD,) * 4, signal_ms=60_000.0, ingresses=16, follow_ms=follow_ms)
        sends = outcome(steady(24, 10.0), Told(), conditions).sends
        return max(Counter(engine for _, engine in sends).values())

    assert busiest(None) >= 12  # each sends its first to the first engine
    assert busiest(0.0) == 6


class Told:
    """The fewest known requests, the first of equals."""

    def choose(self, arrival: Arrival, now_ms: float, engines: object) -> int:
        loads = [engine.in_flight for engine in engines]  # type: ignore[attr-defined]
        return loads.index(min(loads))


def test_a_silent_death_costs_what_was_being_answered_and_little_else() -> None:
    crash = Conditions(timings=(COLD,) * 4, signal_ms=250.0, faults=(Crash(engine=0, at_ms=10_000.0, until_ms=1e9),))
    got = outcome(steady(1_000, 40.0), RoundRobin(), crash)
    assert 0 < got.failed <= 10
    assert len(got.ended) == 1_000 - got.failed
    assert 1.0 < got.attempts_per_request < 1.05
    assert all(engine != 0 for at_ms, engine in got.sends if at_ms > 14_000)


def test_an_engine_that_comes_back_takes_up_what_nobody_has_seen_anything_of() -> None:
    soon = Conditions(timings=(COLD,), signal_ms=250.0, faults=(Crash(engine=0, at_ms=1_000.0, until_ms=2_000.0),))
    got = outcome(steady(40, 100.0), RoundRobin(), soon)
    assert got.failed <= 4
    assert got.attempts_per_request == 1
    assert len(got.ended) + got.failed == 40


def test_a_request_nobody_answers_has_failed_in_the_end() -> None:
    dead = Conditions(timings=(COLD,), faults=(Crash(engine=0, at_ms=1_000.0, until_ms=1e9),), patience_ms=3_000.0)
    got = outcome(steady(40, 100.0), RoundRobin(), dead)
    assert got.failed == 40 - len(got.ended) > 25


def test_requests_that_may_not_be_sent_again_have_failed() -> None:
    class Once(PeerIngress):
        def may_retry(self, now_ms: float) -> bool:
            return False

    crash = Conditions(timings=(COLD,) * 2, signal_ms=250.0, faults=(Crash(engine=0, at_ms=1_000.0, until_ms=1e9),))
    got = run(steady(100, 40.0), lambda seat: Once(RoundRobin(), seat.engines, seat.indexes), crash)
    assert got.attempts_per_request == 1
    assert got.failed > 20


def test_a_gray_failure_shows_in_the_engines_times() -> None:
    slow = Conditions(timings=(COLD,) * 2, faults=(Slow(engine=0, at_ms=5_000.0, until_ms=20_000.0, factor=10.0),))
    got = outcome(steady(500, 60.0), RoundRobin(), slow)

    def mean_ms(engine: int, after_ms: float) -> float:
        some = [one for one in got.by_engine[engine] if after_ms <= one.queued_ms < after_ms + 5_000]
        return sum(one.finished_ms - one.queued_ms for one in some) / len(some)

    assert mean_ms(0, 10_000) > 5 * mean_ms(1, 10_000)
    assert mean_ms(0, 25_000) < 1.5 * mean_ms(1, 25_000)


PLACES = Conditions(timings=(COLD,) * 2, regions=("here", "there"), rtt_ms={("here", "there"): 100.0}, signal_ms=250.0)


def test_a_distance_is_paid_both_ways() -> None:
    got = outcome(steady(2, 5_000.0, region="here"), RoundRobin(), PLACES)
    near, far = (
        one.first_token_ms - one.arrival.at_ms for one in sorted(got.ended, key=lambda one: one.arrival.number)
    )
    assert far - near == pytest.approx(100.0)
    assert PLACES.one_way_ms("there", "here") == 50.0


def test_nothing_gets_into_a_region_that_is_cut_off() -> None:
    cut = Conditions(
        timings=PLACES.timings,
        regions=PLACES.regions,
        rtt_ms=PLACES.rtt_ms,
        signal_ms=250.0,
        faults=(CutOff(region="there", at_ms=5_000.0, until_ms=15_000.0),),
    )
    got = outcome(steady(300, 100.0, region="here"), RoundRobin(), cut)
    during = [engine for at_ms, engine in got.sends if 9_000 < at_ms < 14_900]
    assert set(during) == {0}
    assert 0 < got.failed < 20
    assert any(engine == 1 for at_ms, engine in got.sends if at_ms > 16_000)


def test_what_was_out_of_reach_for_a_moment_comes_after_all() -> None:
    def cut(after_ms: float) -> Outcome:
        fault = CutOff(region="there", at_ms=5_000.0, until_ms=5_000.0 + after_ms)
        conditions = Conditions(
            timings=PLACES.timings, regions=PLACES.regions, rtt_ms=PLACES.rtt_ms, signal_ms=250.0, faults=(fault,)
        )
        return outcome(steady(300, 100.0, region="here", output=250), RoundRobin(), conditions)

    short = cut(1_000.0)  # peers take an engine for dead after 3 s
    assert (short.failed, len(short.ended)) == (0, 300)
    assert any(one.finished_ms == 6_000.0 for one in short.ended)  # answered meanwhile, told when it could be
    crash = Crash(engine=1, at_ms=5_500.0, until_ms=1e9)
    both = Conditions(
        timings=PLACES.timings,
        regions=PLACES.regions,
        signal_ms=250.0,
        faults=(CutOff(region="there", at_ms=5_000.0, until_ms=6_000.0), crash),
    )
    lost = outcome(steady(100, 100.0, region="here"), RoundRobin(), both)
    assert len(lost.ended) + lost.failed == 100


def test_shed_is_counted_apart() -> None:
    class Full(Ingress):
        def choose(self, arrival: Arrival, now_ms: float, tried: frozenset[int]) -> int | None:
            return None if arrival.number % 4 == 0 else 0

    got = report(run(steady(40, 500.0), lambda seat: Full(), Conditions(timings=(COLD,))))
    assert (got.shed, got.failed, got.requests, got.attempts_per_request) == (10, 0, 40, 1.0)
    assert got.goodput == 0.75


def test_hooks_that_nobody_wants_do_nothing() -> None:
    ingress = Ingress()
    assert ingress.may_retry(0.0)
    assert ingress.silent(0.0) == frozenset()
    with pytest.raises(NotImplementedError):
        ingress.choose(steady(1, 1.0)[0], 0.0, frozenset())


def test_a_peer_with_nowhere_left_sheds() -> None:
    fleet = Fleet(Conditions(timings=(COLD,) * 2, signal_ms=100.0), lambda seat: Ingress())
    ingress = PeerIngress(RoundRobin(), fleet.engines, [Index(), Index()])
    assert ingress.choose(steady(1, 1.0)[0], 0.0, frozenset({0, 1})) is None
    assert ingress.choose(steady(1, 1.0)[0], 60_000.0, frozenset({0})) == 1  # all are silent: it's worth a try


def test_what_an_ingress_sees_is_the_signal_and_what_was_sent_since() -> None:
    fleet = Fleet(Conditions(timings=(COLD,), signal_ms=100.0), lambda seat: Ingress())
    engine, index = fleet.engines[0], Index()
    engine.cache.changed = {}
    seen = Seen(0, index)
    first, second, third = steady(3, 1.0, prompt=2_048)
    assert (seen.in_flight, seen.kv_tokens, seen.used_blocks, seen.ttft_ms) == (0, 0, 0, 0.0)
    engine.add(first, 0.0)
    engine.advance(200.0)
    signal = take(engine, 200.0, 1)
    for who in (index, seen):
        who.hear(signal)
    seen.sent(Sent(arrival=first, engine=0, ingress=0, attempt=1, at_ms=100.0))  # the signal has it
    seen.sent(Sent(arrival=second, engine=0, ingress=0, attempt=1, at_ms=300.0))
    assert (seen.in_flight, seen.backlog_tokens) == (2, 2_048)
    assert seen.used_blocks == signal.used_blocks + 32
    assert seen.kv_tokens == engine.kv_tokens > 2_048
    assert seen.ttft_ms == engine.ttft_ms > 0
    assert seen.cached_tokens((*first.prefix, 99)) == 2_048
    engine.add(second, 300.0)
    index.hear(take(engine, 350.0, 1))
    assert seen.cached_tokens(first.prefix) == 2_048
    later: Signal = take(engine, 400.0, 2)
    seen.hear(later)
    assert (seen.in_flight, seen.backlog_tokens) == (2, 2_048)
    index.hear(later)
    assert seen.cached_tokens(first.prefix) == 0  # another life
    assert third.number == 2


def test_shares_of_an_even_run_hardly_swing() -> None:
    even = outcome(steady(400, 100.0), RoundRobin(), Conditions(timings=(COLD,) * 4))
    assert swing(shares(even)) < 0.05
    assert swing([]) == 0.0
    assert report(even).spread < 1.05
    mixed = Conditions(timings=(Timing(prefill_speed=4.0, decode_speed=4.0), COLD))
    assert report(outcome(steady(100, 100.0), RoundRobin(), mixed)).spread > 1.5  # equal shares, unequal speeds


def test_a_seat_says_where_an_ingress_is() -> None:
    seats: list[Seat] = []

    def make(seat: Seat) -> Ingress:
        seats.append(seat)
        return PeerIngress(RoundRobin(), seat.engines, seat.indexes)

    arrivals = [*steady(1, 1.0, region="here"), *steady(1, 1.0, region="there")]
    run(arrivals, make, Conditions(timings=(COLD,), ingresses=2))
    assert [(seat.number, seat.region) for seat in seats] == [(0, "here"), (1, "here"), (2, "there"), (3, "there")]
