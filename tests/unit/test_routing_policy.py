"""The policy, by the failures that routers of this kind had in public."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import mmh3
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_world import MODEL, NOW_MS, STEP, Ingress, candidates, equal, fleet, signal, snapshot

from routing.board import Candidate
from routing.errors import BadSnapshot
from routing.policy import FRESH_MS, PLANS, SILENT_MS, STALE_MS, Query, check, relaxation
from routing.scales import TIE
from wire.messages import Dispatch, EngineSignal

CHAIN = tuple(range(100, 108))


def shares(count: int, places: tuple[Candidate, ...], ingress: Ingress, **query: object) -> Counter[int]:
    """How many of `count` requests would go to each shard, if each were the first."""
    chosen = [ingress.pick(n, places, **query) for n in range(count)]  # type: ignore[arg-type]
    return Counter(choice.shard for choice in chosen if choice is not None)


def idle(count: int, **fields: object) -> list[EngineSignal]:
    return [signal(n, step=STEP, **fields) for n in range(count)]


# ---------------------------------------------------------------- no snapshot


def test_without_a_snapshot_it_is_murmur3_modulo_n() -> None:
    places = candidates(5)
    for n in range(20):
        choice = Ingress().pick(n, places)
        expected = mmh3.hash(f"{MODEL}request-{n}".encode(), signed=False) % 5
        assert choice is not None
        assert (choice.shard, choice.reason) == (expected, "hashed")


def test_without_a_snapshot_a_request_stays_in_its_region() -> None:
    home, away = candidates(3), candidates(3, region="away")
    chosen = {Ingress().pick(n, (*away, *home), home="local") for n in range(30)}
    assert {choice.fleet.region for choice in chosen if choice is not None} == {"local"}
    backup = Ingress().pick(1, (*away, *home), exclude=frozenset(home), home="local")
    assert backup is not None
    assert backup.fleet.region == "away"


def test_the_order_of_the_candidates_does_not_matter() -> None:
    places, ingress = candidates(7), Ingress()
    assert [ingress.pick(n, places) for n in range(50)] == [ingress.pick(n, places[::-1]) for n in range(50)]


def test_an_excluded_shard_moves_only_its_own_requests() -> None:
    places, ingress = candidates(4), Ingress()
    for n in range(100):
        before, after = ingress.pick(n, places), ingress.pick(n, places, exclude={(fleet(), 2)})
        assert before is not None
        assert after is not None
        assert after.shard == (3 if before.shard == 2 else before.shard)


def test_nothing_to_choose_from_is_no_choice() -> None:
    places = candidates(2)
    assert Ingress().pick(1, ()) is None
    assert Ingress().pick(1, places, exclude=places) is None
    assert Ingress(snapshot=equal(places)).pick(1, places, exclude=places) is None


def test_a_request_id_with_a_lone_surrogate_is_routed() -> None:
    assert Ingress().pick("\ud800", candidates(2)) is not None


# ---------------------------------------------------------------- idle engines share


def test_four_idle_engines_share_a_hundred_requests_that_come_one_after_another() -> None:
    places = candidates(4)
    for signals in ([], idle(4, prefixes_full=True)):
        ingress = Ingress(*signals, snapshot=equal(places))
        counts: Counter[int] = Counter()
        for n in range(100):
            choice = ingress.send(n, places, prompt_tokens=2_000, prefix_chain=(n * 10, n * 10 + 1))
            counts[choice.shard] += 1
            ingress.board.ended((f"request-{n}", 1), "answered", NOW_MS)
            ingress.hear(*(signal(m, step=STEP, at_ms=NOW_MS + n) for m in range(4) if signals))
        assert all(15 <= counts[n] <= 40 for n in range(4)), counts


def test_five_engines_under_single_turns_are_within_a_fifth_of_one_another() -> None:
    places = candidates(5)
    ingress = Ingress(*idle(5), snapshot=equal(places))
    counts: Counter[int] = Counter()
    for n in range(1_000):
        now_ms = NOW_MS + 20 * n
        counts[ingress.send(n, places, now_ms=now_ms, prompt_tokens=500 + n % 7 * 300).shard] += 1
        if n % 25 == 24:
            for m, held in enumerate(map(ingress.board.open_at, places)):
                step = msgspec.structs.replace(STEP, decode_ms=10 + held * 1_650 * STEP.decode_token_ms)
                ingress.hear(signal(m, step=step, at_ms=now_ms, running=held, slacks_ms=(100,)))
        if n > 40:
            ingress.board.ended((f"request-{n - 40}", 1))
    assert all(160 <= counts[n] <= 240 for n in range(5)), counts


def test_traffic_follows_the_weights_among_equals() -> None:
    a, b, c = places = candidates(3)
    counts = shares(6000, places, Ingress(*idle(3), snapshot=snapshot({a: 0.5, b: 0.3, c: 0.2})))
    assert counts == {0: pytest.approx(3000, abs=200), 1: pytest.approx(1800, abs=200), 2: pytest.approx(1200, abs=200)}


def test_a_share_binds_however_idle_its_engine_is() -> None:
    a, b = places = candidates(2)
    always_new = snapshot({a: 0.97, b: 0.03}, age_ms=-50_000)
    ingress = Ingress(signal(0, running=20, step=STEP), signal(1, step=STEP), snapshot=always_new)
    counts: Counter[int] = Counter()
    for n in range(1000):
        counts[ingress.send(n, places, now_ms=NOW_MS + 50 * n).shard] += 1
        ingress.board.ended((f"request-{n}", 1))
        ingress.hear(
            signal(0, running=20, step=STEP, at_ms=NOW_MS + 50 * n), signal(1, step=STEP, at_ms=NOW_MS + 50 * n)
        )
    assert 20 <= counts[1] <= 100, "30, a quarter more, and in each of 5 ten seconds twice the root of 6"


def test_a_shard_without_weight_gets_nothing() -> None:
    a, b = places = candidates(2)
    assert shares(100, places, Ingress(snapshot=snapshot({a: 1.0, b: 0.0}))) == {0: 100}


def test_a_route_outside_the_candidates_is_never_taken() -> None:
    places = candidates(3)
    assert set(shares(100, places[:1], Ingress(snapshot=equal(places)))) == {0}


def test_the_same_input_gives_the_same_choice() -> None:
    places = candidates(8)
    signals = [signal(n, running=n) for n in range(8)]
    first, second = (Ingress(*signals, snapshot=equal(places)) for _ in range(2))
    assert [first.pick(n, places) for n in range(50)] == [second.pick(n, places) for n in range(50)]


# ---------------------------------------------------------------- load


def test_the_idle_engine_wins_over_the_one_with_forty_in_flight() -> None:
    a, _ = places = candidates(2)
    for signals in ([], idle(2)):
        ingress = Ingress(*signals, snapshot=equal(places))
        ingress.own(a, 40)
        assert shares(100, places, ingress, prompt_tokens=100) == {1: 100}
    busy = signal(0, running=32, queued_requests=8), signal(1)
    assert shares(100, places, Ingress(*busy, snapshot=equal(places)), prompt_tokens=100) == {1: 100}


def test_a_cache_miss_goes_to_the_idle_engine_however_large_its_cache() -> None:
    places = candidates(2)
    busy = signal(0, running=30, queued_requests=10, queued_tokens=9_000, step=STEP, prefixes_added=(1, 2))
    calm = signal(1, step=STEP, prefixes_added=tuple(range(1_000, 5_000)))
    counts = shares(100, places, Ingress(busy, calm, snapshot=equal(places)), prompt_tokens=600, prefix_chain=(9, 10))
    assert counts == {1: 100}


def test_what_was_just_sent_counts_though_no_signal_shows_it() -> None:
    a, _ = places = candidates(2)
    own = Ingress(*idle(2, running=4), snapshot=equal(places))
    for n in range(20):
        own.board.sent((f"r{n}", 1), a, 500, (), NOW_MS)
    others = Ingress(*idle(2, running=4), snapshot=equal(places))
    others.board.told([Dispatch(fleet=a.fleet, shard=0, prompt_tokens_estimate=500)] * 20, NOW_MS)
    for ingress in (own, others):
        assert shares(50, places, ingress, prompt_tokens=500) == {1: 50}


def test_an_unknown_load_is_the_mean_of_what_is_known() -> None:
    places = candidates(3)
    known = signal(0, running=10, step=STEP), signal(1, running=30, step=STEP)  # nothing was heard of 2
    ingress = Ingress(*known, snapshot=equal(places))
    assert ingress.board.held(ingress.board.rows(places)).tolist() == [10, 30, 20]
    ingress.own(places[2], 50)
    assert ingress.board.held(ingress.board.rows(places)).tolist() == [10, 30, 50]


def test_a_slower_engine_gets_less() -> None:
    # half the speed in both: the marginal request costs as much on either when the slow one has half as many
    places = candidates(2)
    slow = {"prefill_token_ms": 0.02, "prefill_fixed_ms": 20.0, "decode_ms": 20.0, "decode_token_ms": 4e-5}
    fast_step, slow_step = STEP, type(STEP)(**slow, piece_tokens=8_000)
    ingress = Ingress(signal(0, step=fast_step), signal(1, step=slow_step), snapshot=equal(places))
    counts = Counter(ingress.send(n, places, prompt_tokens=1_000).shard for n in range(60))
    assert counts[0] > counts[1] >= 1


def test_an_engine_that_measured_nothing_is_taken_for_slow_and_not_for_free() -> None:
    places = candidates(2)
    ingress = Ingress(signal(0, step=STEP), signal(1), snapshot=equal(places))
    counts = Counter(ingress.send(n, places, prompt_tokens=1_000).shard for n in range(60))
    assert counts[0] > counts[1] >= 1


@pytest.mark.parametrize("count", [-5, 0])
def test_a_negative_count_is_taken_for_none(count: int) -> None:
    places = candidates(2)
    negative = signal(0, running=count, queued_requests=count, queued_tokens=count, slots=count)
    assert Ingress(negative, signal(1), snapshot=equal(places)).pick(1, places) is not None


def test_sixteen_ingresses_on_one_stale_snapshot_do_not_herd() -> None:
    places = candidates(8)
    total: Counter[int] = Counter()
    for ingress in range(16):
        mine = Ingress(*idle(8), snapshot=equal(places, age_ms=10_000))
        total.update(mine.send(f"{ingress}-{n}", places, prompt_tokens=500).shard for n in range(50))
    assert max(total.values()) <= 1.5 * 800 / 8


def test_480_concurrent_requests_are_spread_evenly() -> None:
    places = candidates(8)
    ingress = Ingress(*idle(8, slots=256), snapshot=equal(places))
    counts = Counter(ingress.send(n, places, prompt_tokens=400 + n % 5 * 100).shard for n in range(480))
    assert max(counts.values()) / (480 / 8) <= 1.25, counts


def test_one_long_stream_stays_one_request_through_ten_signals() -> None:
    a, _ = places = candidates(2)
    ingress = Ingress(*idle(2), snapshot=equal(places))
    ingress.own(a, 1)
    for n in range(10):
        ingress.hear(*idle(2, at_ms=NOW_MS + 500 * n))
        assert ingress.board.open_at(a) == 1
        assert ingress.board.held(ingress.board.rows([a])).tolist() == [1]


def test_a_full_engine_makes_a_request_wait_for_a_slot() -> None:
    places = candidates(2)
    full = signal(0, running=32, queued_requests=900, step=STEP, slacks_ms=(9_000,))
    roomy = signal(1, running=32, queued_requests=900, slots=1_000, step=STEP, slacks_ms=(9_000,))
    assert shares(50, places, Ingress(full, roomy, snapshot=equal(places))) == {1: 50}


def test_among_many_engines_the_best_is_found_and_equal_ones_share() -> None:
    places = candidates(64)
    equal_ones = Ingress(*idle(64), snapshot=equal(places))
    assert len(shares(1_000, places, equal_ones, prompt_tokens=500)) == 64
    one_free = [signal(n, step=STEP, queued_requests=n != 41, queued_tokens=(n != 41) * 20_000) for n in range(64)]
    assert shares(20, places, Ingress(*one_free, snapshot=equal(places)), prompt_tokens=500) == {41: 20}
    # the least of its own loss is where others would lose most: it is the shortest queue, of choices without any slack
    engines = [
        signal(n, step=STEP, running=30, slacks_ms=(0,) if n < 8 else (9_000,), queued_tokens=0 if n < 8 else 50)
        for n in range(64)
    ]
    chosen = shares(20, places, Ingress(*engines, snapshot=equal(places)), prompt_tokens=60_000)
    assert min(chosen) >= 8


# ---------------------------------------------------------------- prefixes


def test_a_prompt_goes_where_its_beginning_is() -> None:
    places = candidates(3)
    engines = idle(3, prefixes_full=True)[:2]
    known = signal(2, step=STEP, prefixes_added=CHAIN)
    choice = Ingress(*engines, known, snapshot=equal(places)).pick(1, places, prompt_tokens=600, prefix_chain=CHAIN)
    assert choice is not None
    assert (choice.shard, choice.reason, choice.cached_tokens) == (2, "affinity", 8 * 64)


def test_a_hot_prefix_spreads_when_its_engine_is_busy() -> None:
    places = candidates(4)
    engines = [signal(n, step=STEP, prefixes_full=True, prefixes_added=CHAIN if n == 0 else ()) for n in range(4)]
    ingress = Ingress(*engines, snapshot=equal(places))
    counts = Counter(ingress.send(n, places, prompt_tokens=600, prefix_chain=CHAIN).shard for n in range(200))
    assert len(counts) == 4
    assert max(counts.values()) <= 1.5 * 200 / 4


def test_who_was_sent_a_prompt_is_hoped_to_have_it() -> None:
    places = candidates(4)
    ingress = Ingress(*idle(4, prefixes_full=True), snapshot=equal(places))
    first = ingress.send(1, places, prompt_tokens=600, prefix_chain=CHAIN)
    second = ingress.send(2, places, prompt_tokens=600, prefix_chain=CHAIN)
    assert first.shard == second.shard
    assert second.cached_tokens == 8 * 64


# ---------------------------------------------------------------- eligibility


def test_an_engine_that_says_it_is_not_ready_gets_nothing() -> None:
    places = candidates(2)
    for state in ("loading", "warming", "draining", "failed"):
        assert shares(50, places, Ingress(signal(0, state=state), signal(1), snapshot=equal(places))) == {1: 50}


def test_an_engine_that_fell_silent_while_others_speak_gets_nothing() -> None:
    places = candidates(2)
    known = signal(0, at_ms=NOW_MS - round(SILENT_MS) - 1), signal(1)
    assert shares(50, places, Ingress(*known, snapshot=equal(places))) == {1: 50}


def test_without_a_snapshot_a_backup_is_one_that_is_not_silent_if_there_is_one() -> None:
    places = candidates(4)
    old = round(SILENT_MS) + 1
    ingress = Ingress(*(signal(n, at_ms=NOW_MS - old * (n < 2)) for n in range(4)))
    assert ingress.policy.silent(places) == set(places[:2])
    assert set(shares(50, places, ingress)) == {0, 1, 2, 3}, "the first try is the hash's"
    assert set(shares(50, places, ingress, exclude=frozenset(places[:1]))) == {2, 3}
    assert set(shares(50, places, ingress, exclude=frozenset(places[1:]))) == {0}, "only a silent one is left"


def test_when_all_fall_silent_it_is_the_log_and_routing_goes_on() -> None:
    places = candidates(2)
    known = [signal(n, at_ms=NOW_MS - 60_000) for n in range(2)]
    assert set(shares(50, places, Ingress(*known, snapshot=equal(places)))) == {0, 1}


def test_a_request_goes_only_where_it_fits() -> None:
    places = candidates(2)
    ingress = Ingress(signal(0, context_tokens=4_096), signal(1, context_tokens=32_768), snapshot=equal(places))
    assert shares(50, places, ingress, prompt_tokens=4_000, answer_tokens=200) == {1: 50}
    assert set(shares(50, places, ingress, prompt_tokens=4_000, answer_tokens=96)) == {0, 1}


def test_a_request_that_fits_nowhere_is_left_to_an_owner_to_refuse() -> None:
    places = candidates(2)
    ingress = Ingress(*(signal(n, context_tokens=100) for n in range(2)), snapshot=equal(places))
    assert {choice.reason for n in range(9) if (choice := ingress.pick(n, places, prompt_tokens=5_000))} == {"unfit"}
    ingress.hear(signal(0, context_tokens=100, state="failed"))
    alive = {choice.shard for n in range(9) if (choice := ingress.pick(n, places, prompt_tokens=5_000))}
    assert alive == {1}, "and not to one that can't answer"


def test_a_request_goes_only_where_its_features_are() -> None:
    places = candidates(3)
    engines = signal(0, features=()), signal(1, features=("tools", "logprobs")), signal(2, features=("tools",))
    ingress = Ingress(*engines, snapshot=equal(places))
    assert shares(50, places, ingress, features=frozenset({"tools", "logprobs"})) == {1: 50}


def test_a_request_stays_in_its_region() -> None:
    here, there = candidates(2), candidates(2, region="there")
    engines = [*(signal(n) for n in range(2)), *(signal(n, region="there") for n in range(2))]
    ingress = Ingress(*engines, snapshot=equal(here + there))
    chosen = [ingress.pick(n, here + there, residency="there") for n in range(50)]
    assert {choice.fleet.region for choice in chosen if choice is not None} == {"there"}


def test_the_second_attempt_goes_elsewhere() -> None:
    places = candidates(3)
    ingress = Ingress(snapshot=equal(places))
    for n in range(50):
        first = ingress.pick(n, places)
        assert first is not None
        second = ingress.pick(n, places, exclude=[(first.fleet, first.shard)])
        assert second is not None
        assert second.shard != first.shard
        assert (first.reason, second.reason) == ("weight", "backup")


def test_when_the_cached_engine_is_dead_the_second_attempt_goes_elsewhere() -> None:
    a, *_ = places = candidates(3)
    engines = signal(0, step=STEP, prefixes_added=CHAIN), *idle(3)[1:]
    ingress = Ingress(*engines, snapshot=equal(places))
    first = ingress.send(1, places, prompt_tokens=600, prefix_chain=CHAIN)
    second = ingress.pick(1, places, prompt_tokens=600, prefix_chain=CHAIN, exclude=[a])
    assert first.shard == 0
    assert second is not None
    assert second.shard in (1, 2)


def test_the_backup_of_a_snapshots_only_shard_is_whoever_says_it_is_ready() -> None:
    a, *_ = places = candidates(3)
    known = signal(0), signal(1, state="failed"), signal(2)
    choice = Ingress(*known, snapshot=snapshot({a: 1.0})).pick(1, places, exclude=[a])
    assert choice is not None
    assert (choice.shard, choice.reason) == (2, "backup")


def test_when_no_engine_is_known_to_be_ready_the_log_still_takes_it() -> None:
    # durable acceptance: an engine that comes up within its accept_by_ms runs it
    places = candidates(4)
    nobody = Ingress(signal(0, state="loading"), snapshot=snapshot({}))
    choices = [nobody.pick(n, places) for n in range(20)]
    assert {choice.reason for choice in choices if choice is not None} == {"hashed"}
    assert choices == [Ingress().pick(n, places) for n in range(20)]


# ---------------------------------------------------------------- trust


def test_failures_send_others_elsewhere_and_are_forgotten() -> None:
    a, _ = places = candidates(2)
    ingress = Ingress(*idle(2), snapshot=equal(places))
    ingress.board.sent(("r", 1), a, 1, (), NOW_MS)
    ingress.board.ended(("r", 1), "failed", NOW_MS)
    assert shares(100, places, ingress) == {1: 100}
    later = [ingress.pick(n, places, now_ms=NOW_MS + 120_000) for n in range(100)]
    assert {choice.shard for choice in later if choice is not None} == {0, 1}


def test_ten_requests_over_the_context_length_are_held_against_nobody() -> None:
    a, _ = places = candidates(2)
    ingress = Ingress(*idle(2), snapshot=equal(places))
    for n in range(10):
        ingress.board.sent((f"r{n}", 1), a, 1, (), NOW_MS)
        ingress.board.ended((f"r{n}", 1), "client_error", NOW_MS)
    assert shares(100, places, ingress, now_ms=NOW_MS + 60_000)[0] >= 20
    assert not ingress.board.blamed


def test_the_last_engine_is_never_ejected() -> None:
    (a,) = places = candidates(1)
    ingress = Ingress(signal(0), snapshot=equal(places))
    for n in range(50):
        ingress.board.sent((f"r{n}", 1), a, 1, (), NOW_MS)
        ingress.board.ended((f"r{n}", 1), "overloaded", NOW_MS)
    assert shares(20, places, ingress) == {0: 20}


def test_an_earlier_lifes_failure_is_not_the_next_ones() -> None:
    a, _ = places = candidates(2)
    ingress = Ingress(*idle(2), snapshot=equal(places))
    ingress.board.sent(("r", 1), a, 1, (), NOW_MS)
    ingress.hear(signal(0, incarnation="b", step=STEP, at_ms=NOW_MS + 1))
    ingress.board.ended(("r", 1), "failed", NOW_MS + 2)
    ingress.board.ended(("r", 1), "failed", NOW_MS + 3)
    assert ingress.board.open_at(a) == 0
    assert set(shares(50, places, ingress)) == {0, 1}


# ---------------------------------------------------------------- pools and regions


def test_the_fallback_share_is_the_snapshots_to_say_whatever_the_load() -> None:
    gpu, cpu = candidates(2, "gpu"), candidates(2, "cpu")
    weights = dict.fromkeys(gpu, 0.4) | dict.fromkeys(cpu, 0.1)
    busy = *(signal(n, running=32, queued_requests=9) for n in range(2)), *(signal(n, "cpu") for n in (0, 1))
    ingress = Ingress(*busy, snapshot=snapshot(weights))
    chosen = [ingress.pick(n, gpu + cpu) for n in range(2000)]
    to_cpu = sum(choice.fleet.pool == "cpu" for choice in chosen if choice is not None)
    assert 320 <= to_cpu <= 480  # a fifth


def test_when_the_gpu_engines_are_excluded_a_ready_cpu_engine_takes_over() -> None:
    gpu, cpu = candidates(1, "gpu"), candidates(1, "cpu")
    choice = Ingress(signal(0), signal(0, "cpu"), snapshot=equal(gpu)).pick(1, gpu + cpu, exclude=gpu)
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
    seconds = (0, 10, 20, 29)
    to_b = [shares(1000, places, Ingress(*idle(2), snapshot=snapshot({a: 0.8, b: 0.2}, s * 1000)))[1] for s in seconds]
    assert to_b == sorted(to_b)
    assert 150 <= to_b[0] <= 250 < 400 <= to_b[-1] <= 600


def test_with_a_dead_control_plane_the_least_loaded_is_chosen() -> None:
    places = candidates(4)
    known = [signal(n, running=running) for n, running in enumerate((9, 3, 12, 7))]
    old = snapshot(dict(zip(places, (0.7, 0.1, 0.1, 0.1), strict=True)), age_ms=STALE_MS)
    ingress = Ingress(*known, snapshot=old)
    assert shares(100, places, ingress) == {1: 100}
    choice = ingress.pick(1, places)
    assert choice is not None
    assert choice.reason == "local"


def test_with_a_dead_control_plane_ties_are_shared() -> None:
    places = candidates(4)
    counts = shares(400, places, Ingress(*idle(4), snapshot=equal(places, age_ms=STALE_MS)))
    assert all(70 <= counts[n] <= 130 for n in range(4)), counts


# ---------------------------------------------------------------- bad snapshots


@pytest.mark.parametrize("weight", [math.nan, math.inf, -0.1])
def test_a_snapshot_with_a_bad_weight_is_refused_and_never_followed(weight: float) -> None:
    a, b = places = candidates(2)
    bad = snapshot({a: weight, b: 1.0})
    with pytest.raises(BadSnapshot):
        check(bad)
    followed = Ingress(snapshot=bad)
    assert [followed.pick(n, places) for n in range(20)] == [Ingress().pick(n, places) for n in range(20)]


def test_weights_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(BadSnapshot, match="sum to 1"):
        check(snapshot(dict.fromkeys(candidates(3), 0.5)))
    check(equal(candidates(3)))
    check(snapshot({}))


def test_a_new_snapshot_takes_the_place_of_the_old_one() -> None:
    a, b = places = candidates(2)
    ingress = Ingress(snapshot=snapshot({a: 1.0}))
    assert shares(10, places, ingress) == {0: 10}
    ingress.policy.follow(snapshot({b: 1.0}))
    assert shares(10, places, ingress) == {1: 10}
    ingress.policy.follow(None)
    assert {choice.reason for n in range(10) if (choice := ingress.pick(n, places))} == {"hashed"}


def test_ever_new_sets_of_candidates_do_not_pile_up() -> None:
    ingress = Ingress(snapshot=equal(candidates(2)))
    kept = [candidates(2) for _ in range(PLANS + 5)]
    for places in kept:
        ingress.pick(1, places)
    assert len(ingress.policy._plans) <= PLANS


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


@settings(deadline=None)
@given(engines, st.integers(0, 100_000), st.integers(), st.integers(1, 200_000))
def test_a_choice_is_always_a_usable_candidate(
    world: list[tuple[float, tuple[int, str, int] | None, int, bool]], age_ms: int, number: int, tokens: int
) -> None:
    places = candidates(len(world))
    exclude = frozenset(c for c, (*_, excluded) in zip(places, world, strict=True) if excluded)
    weights = {c: w for c, (w, *_) in zip(places, world, strict=True)}
    ingress = Ingress(snapshot=snapshot(weights, age_ms))
    for n, (_, said, own, _) in enumerate(world):
        if said is not None:
            ingress.hear(signal(n, running=said[0], state=said[1], at_ms=NOW_MS - said[2]))
        ingress.own(places[n], own)
    choice = ingress.pick(number, places, exclude=exclude, prompt_tokens=tokens)
    if len(exclude) == len(places):
        assert choice is None
        return
    assert choice is not None
    assert (choice.fleet, choice.shard) in set(places) - exclude
    query = Query(request_id=f"request-{number}", model=MODEL, candidates=places, prompt_tokens=tokens)
    offers = ingress.policy.offers(query, NOW_MS, exclude)
    assert bool(offers) == (choice.reason not in ("hashed", "unfit"))
    if offers:
        (chosen,) = (offer for offer in offers if offer.candidate == (choice.fleet, choice.shard))
        least = min(offer.loss for offer in offers if offer.able)
        assert chosen.able
        assert chosen.loss <= least + TIE * (1 + 1e-9)
        assert (choice.loss, choice.wait_ms) == pytest.approx((least, chosen.wait_ms))
        assert choice.cached_tokens == chosen.cached_tokens
        assert sum(offer.weight for offer in offers) == pytest.approx(1)


def test_what_is_offered_is_of_the_pool_that_was_drawn() -> None:
    gpu, cpu = candidates(2, "gpu"), candidates(2, "cpu")
    ingress = Ingress(signal(0), signal(1), signal(0, "cpu"), signal(1, "cpu"), snapshot=equal(gpu + cpu))
    pools = set()
    for number in range(20):
        query = Query(request_id=f"request-{number}", model=MODEL, candidates=gpu + cpu)
        choice = ingress.pick(number, gpu + cpu)
        assert choice is not None
        able = [offer.candidate.fleet.pool for offer in ingress.policy.offers(query, NOW_MS) if offer.able]
        assert able == [choice.fleet.pool] * 2
        pools |= set(able)
    assert pools == {"gpu", "cpu"}
