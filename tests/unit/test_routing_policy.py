"""The policy, by the failures that routers of this kind had in public."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import mmh3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_world import MODEL, NOW_MS, by_shard, candidates, equal, fleet, pick, signal, snapshot

from routing.errors import BadSnapshot
from routing.policy import FRESH_MS, SILENT_MS, STALE_MS, Candidate, check, relaxation


def shares(count: int, places: list[Candidate], **known: object) -> Counter[int]:
    """How many of `count` requests went to each shard."""
    chosen = [pick(n, places, **known) for n in range(count)]
    return Counter(choice.shard for choice in chosen if choice is not None)


# ---------------------------------------------------------------- no snapshot


def test_without_a_snapshot_it_is_murmur3_modulo_n() -> None:
    places = candidates(5)
    for n in range(20):
        choice = pick(n, places)
        expected = mmh3.hash(f"{MODEL}request-{n}".encode(), signed=False) % 5
        assert choice is not None
        assert (choice.shard, choice.reason) == (expected, "hashed")


def test_the_order_of_the_candidates_does_not_matter() -> None:
    places = candidates(7)
    assert [pick(n, places) for n in range(50)] == [pick(n, places[::-1]) for n in range(50)]


def test_an_excluded_shard_moves_only_its_own_requests() -> None:
    places, gone = candidates(4), frozenset({(fleet(), 2)})
    for n in range(100):
        before, after = pick(n, places), pick(n, places, exclude=gone)
        assert before is not None
        assert after is not None
        assert after.shard == (3 if before.shard == 2 else before.shard)


def test_nothing_to_choose_from_is_no_choice() -> None:
    places = candidates(2)
    assert pick(1, []) is None
    assert pick(1, places, exclude=frozenset(places)) is None
    assert pick(1, places, exclude=frozenset(places), snapshot=equal(places)) is None


def test_a_request_id_with_a_lone_surrogate_is_routed() -> None:
    assert pick("\ud800", candidates(2)) is not None


# ---------------------------------------------------------------- weights


def test_four_idle_engines_share_a_hundred_requests() -> None:
    places = candidates(4)
    idle = by_shard(*(signal(n) for n in range(4)))
    for known in ({}, {"signals": idle}):
        counts = shares(100, places, snapshot=equal(places), **known)
        assert all(15 <= counts[n] <= 40 for n in range(4)), counts


def test_five_engines_under_single_turns_are_within_a_fifth_of_one_another() -> None:
    places = candidates(5)
    counts = shares(5000, places, snapshot=equal(places))
    assert all(800 <= counts[n] <= 1200 for n in range(5)), counts


def test_traffic_follows_the_weights() -> None:
    a, b, c = places = candidates(3)
    counts = shares(6000, places, snapshot=snapshot({a: 0.5, b: 0.3, c: 0.2}), signals={})
    assert counts[0] > counts[1] > counts[2] > 900


def test_a_shard_without_weight_gets_nothing() -> None:
    a, b = places = candidates(2)
    assert shares(100, places, snapshot=snapshot({a: 1.0, b: 0.0})) == {0: 100}


def test_a_route_outside_the_candidates_is_never_taken() -> None:
    places = candidates(3)
    assert set(shares(100, places[:1], snapshot=equal(places))) == {0}


def test_the_same_input_gives_the_same_choice() -> None:
    places = candidates(8)
    known = {"snapshot": equal(places), "signals": by_shard(*(signal(n, running=n) for n in range(8)))}
    assert [pick(n, places, **known) for n in range(50)] == [pick(n, places, **known) for n in range(50)]


# ---------------------------------------------------------------- load


def test_the_idle_engine_wins_over_the_one_with_forty_in_flight() -> None:
    a, b = places = candidates(2)
    assert shares(100, places, snapshot=equal(places), in_flight={a: 40, b: 0}) == {1: 100}
    busy = by_shard(signal(0, running=32, queued_requests=8), signal(1))
    assert shares(100, places, snapshot=equal(places), signals=busy) == {1: 100}


def test_a_small_difference_is_noise() -> None:
    places = candidates(2)
    nearly = by_shard(signal(0, running=20), signal(1, running=21))
    counts = shares(1000, places, snapshot=equal(places), signals=nearly)
    assert 400 <= counts[0] <= 600


def test_a_share_of_the_load_is_judged_by_weight() -> None:
    a, b = places = candidates(2)
    eight_each = by_shard(signal(0, running=8), signal(1, running=8))
    assert shares(50, places, snapshot=snapshot({a: 0.8, b: 0.2}), signals=eight_each) == {0: 50}
    as_weighted = by_shard(signal(0, running=12), signal(1, running=3))
    counts = shares(1000, places, snapshot=snapshot({a: 0.8, b: 0.2}), signals=as_weighted)
    assert 150 <= counts[1] <= 250


def test_an_idle_engine_with_a_penalty_keeps_its_small_share() -> None:
    a, b = places = candidates(2)
    known = by_shard(signal(0, running=20), signal(1))
    counts = shares(1000, places, snapshot=snapshot({a: 0.97, b: 0.03}), signals=known)
    assert 10 <= counts[1] <= 60


def test_what_was_just_sent_counts_though_no_signal_shows_it() -> None:
    a, _ = places = candidates(2)
    signals = by_shard(signal(0, running=4), signal(1, running=4))
    assert shares(50, places, snapshot=equal(places), signals=signals, unseen={a: 20}) == {1: 50}
    assert shares(50, places, snapshot=equal(places), signals=signals, in_flight={a: 24}) == {1: 50}


def test_an_unknown_load_is_not_zero() -> None:
    places = candidates(3)
    known = by_shard(signal(0, running=10), signal(1, running=12))  # nothing was heard of 2
    counts = shares(900, places, snapshot=equal(places), signals=known)
    assert all(200 <= counts[n] <= 450 for n in range(3)), counts


def test_an_unknown_engine_with_many_of_our_own_requests_is_full() -> None:
    places = candidates(2)
    known = by_shard(signal(0, running=2))
    assert shares(50, places, snapshot=equal(places), signals=known, in_flight={places[1]: 30}) == {0: 50}


@pytest.mark.parametrize("count", [-5, 0])
def test_a_negative_count_is_taken_for_none(count: int) -> None:
    places = candidates(2)
    negative = by_shard(signal(0, running=count, queued_requests=count, slots=count), signal(1))
    assert pick(1, places, snapshot=equal(places), in_flight={places[0]: count}, signals=negative) is not None


def test_sixteen_ingresses_on_one_stale_snapshot_do_not_herd() -> None:
    places = candidates(8)
    total: Counter[int] = Counter()
    for ingress in range(16):
        in_flight: Counter[tuple[object, int]] = Counter()
        for n in range(50):
            choice = pick(f"{ingress}-{n}", places, snapshot=equal(places, age_ms=10_000), in_flight=in_flight)
            assert choice is not None
            in_flight[choice.fleet, choice.shard] += 1
            total[choice.shard] += 1
    assert max(total.values()) <= 1.5 * 800 / 8


# ---------------------------------------------------------------- eligibility


def test_an_engine_that_says_it_is_not_ready_gets_nothing() -> None:
    places = candidates(2)
    for state in ("loading", "warming", "draining", "failed"):
        known = by_shard(signal(0, state=state), signal(1))
        assert shares(50, places, snapshot=equal(places), signals=known) == {1: 50}


def test_an_engine_that_fell_silent_while_others_speak_gets_nothing() -> None:
    places = candidates(2)
    known = by_shard(signal(0, at_ms=NOW_MS - SILENT_MS - 1), signal(1))
    assert shares(50, places, snapshot=equal(places), signals=known) == {1: 50}


def test_when_all_fall_silent_it_is_the_log_and_routing_goes_on() -> None:
    places = candidates(2)
    known = by_shard(*(signal(n, at_ms=NOW_MS - 60_000) for n in range(2)))
    assert set(shares(50, places, snapshot=equal(places), signals=known)) == {0, 1}


def test_the_second_attempt_goes_elsewhere() -> None:
    places = candidates(3)
    for n in range(50):
        first = pick(n, places, snapshot=equal(places))
        assert first is not None
        second = pick(n, places, snapshot=equal(places), exclude=frozenset({(first.fleet, first.shard)}))
        assert second is not None
        assert second.shard != first.shard
        assert (first.reason, second.reason) == ("weighted", "backup")


def test_the_backup_of_a_snapshots_only_shard_is_whoever_says_it_is_ready() -> None:
    a, *_ = places = candidates(3)
    known = by_shard(signal(0), signal(1, state="failed"), signal(2))
    choice = pick(1, places, snapshot=snapshot({a: 1.0}), signals=known, exclude=frozenset({a}))
    assert choice is not None
    assert (choice.shard, choice.reason) == (2, "backup")


def test_when_no_engine_is_known_to_be_ready_the_log_still_takes_it() -> None:
    # durable acceptance: an engine that comes up within its accept_by_ms runs it
    places = candidates(4)
    nobody = snapshot({})
    choices = [pick(n, places, snapshot=nobody, signals=by_shard(signal(0, state="loading"))) for n in range(20)]
    assert {choice.reason for choice in choices if choice is not None} == {"hashed"}
    assert choices == [pick(n, places) for n in range(20)]


# ---------------------------------------------------------------- pools


def test_the_fallback_share_is_the_snapshots_to_say_whatever_the_load() -> None:
    gpu, cpu = candidates(2, "gpu"), candidates(2, "cpu")
    weights = dict.fromkeys(gpu, 0.4) | dict.fromkeys(cpu, 0.1)
    busy = by_shard(*(signal(n, running=32, queued_requests=9) for n in range(2)), *(signal(n, "cpu") for n in (0, 1)))
    chosen = [pick(n, gpu + cpu, snapshot=snapshot(weights), signals=busy) for n in range(2000)]
    to_cpu = sum(choice.fleet.pool == "cpu" for choice in chosen if choice is not None)
    assert 320 <= to_cpu <= 480  # a fifth


def test_when_the_gpu_engines_are_excluded_a_ready_cpu_engine_takes_over() -> None:
    gpu, cpu = candidates(1, "gpu"), candidates(1, "cpu")
    known = by_shard(signal(0), signal(0, "cpu"))
    choice = pick(1, gpu + cpu, snapshot=equal(gpu), signals=known, exclude=frozenset(gpu))
    assert choice is not None
    assert choice.fleet.pool == "cpu"


# ---------------------------------------------------------------- staleness


def test_relaxation_has_no_cliff() -> None:
    assert (relaxation(-5), relaxation(0), relaxation(FRESH_MS)) == (0, 0, 0)
    assert (relaxation(STALE_MS), relaxation(10 * STALE_MS)) == (1, 1)
    steps = [relaxation(age) for age in range(0, STALE_MS + 1000, 100)]
    assert all(0 <= after - before < 0.01 for before, after in pairwise(steps))


def test_a_stale_snapshots_weights_fade_to_equal_shares() -> None:
    a, b = places = candidates(2)
    known = {"signals": by_shard(signal(0), signal(1))}
    seconds = (0, 10, 20, 29)
    to_b = [shares(1000, places, snapshot=snapshot({a: 0.8, b: 0.2}, age_ms=s * 1000), **known)[1] for s in seconds]
    assert to_b == sorted(to_b)
    assert 150 <= to_b[0] <= 250 < 400 <= to_b[-1] <= 600


def test_with_a_dead_control_plane_the_least_loaded_is_chosen() -> None:
    places = candidates(4)
    known = by_shard(*(signal(n, running=running) for n, running in enumerate((9, 3, 12, 7))))
    old = snapshot(dict(zip(places, (0.7, 0.1, 0.1, 0.1), strict=True)), age_ms=STALE_MS)
    assert shares(100, places, snapshot=old, signals=known) == {1: 100}
    choice = pick(1, places, snapshot=old, signals=known)
    assert choice is not None
    assert choice.reason == "local"


def test_local_load_is_judged_by_slots() -> None:
    places = candidates(3)  # nothing was heard of 2: it counts as the mean of the others
    mixed = by_shard(signal(0, running=16, slots=64), signal(1, running=12, slots=16))
    assert shares(50, places, snapshot=equal(places, age_ms=STALE_MS), signals=mixed) == {0: 50}


def test_with_a_dead_control_plane_ties_are_shared() -> None:
    places = candidates(4)
    counts = shares(400, places, snapshot=equal(places, age_ms=STALE_MS))
    assert all(70 <= counts[n] <= 130 for n in range(4)), counts


# ---------------------------------------------------------------- bad snapshots


@pytest.mark.parametrize("weight", [math.nan, math.inf, -0.1])
def test_a_snapshot_with_a_bad_weight_is_refused_and_never_followed(weight: float) -> None:
    a, b = places = candidates(2)
    bad = snapshot({a: weight, b: 1.0})
    with pytest.raises(BadSnapshot):
        check(bad)
    assert [pick(n, places, snapshot=bad) for n in range(20)] == [pick(n, places) for n in range(20)]


def test_weights_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(BadSnapshot, match="sum to 1"):
        check(snapshot(dict.fromkeys(candidates(3), 0.5)))
    check(equal(candidates(3)))
    check(snapshot({}))


# ---------------------------------------------------------------- whatever comes


engines = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.one_of(st.none(), st.tuples(st.integers(0, 90), st.sampled_from(["ready", "failed"]), st.integers(0, 9000))),
        st.integers(0, 50),
        st.booleans(),
    ),
    max_size=12,
)


@given(engines, st.integers(0, 100_000), st.integers())
def test_a_choice_is_always_a_usable_candidate(
    world: list[tuple[float, tuple[int, str, int] | None, int, bool]], age_ms: int, number: int
) -> None:
    places = candidates(len(world))
    exclude = frozenset(c for c, (*_, excluded) in zip(places, world, strict=True) if excluded)
    signals = by_shard(
        *(
            signal(n, running=said[0], state=said[1], at_ms=NOW_MS - said[2])
            for n, (_, said, _, _) in enumerate(world)
            if said is not None
        )
    )
    in_flight = {c: own for c, (_, _, own, _) in zip(places, world, strict=True)}
    weights = {c: w for c, (w, *_) in zip(places, world, strict=True)}
    choice = pick(
        number,
        places,
        snapshot=snapshot(weights, age_ms),
        in_flight=in_flight,
        signals=signals,
        exclude=exclude,
    )
    if len(exclude) == len(places):
        assert choice is None
    else:
        assert choice is not None
        assert (choice.fleet, choice.shard) in set(places) - exclude
