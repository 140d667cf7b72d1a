"""The earlier design: weights by feedback, requests by weighted hashing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_world import Ingress, candidates, equal, signal, snapshot

from routing import sketch
from routing.earlier import LEAST, MOST, EarlierPolicy, Feedback, hashed, reweighed, score
from wire.messages import EngineSignal, Route


def loads(*running: int) -> list[EngineSignal]:
    return [signal(n, running=count) for n, count in enumerate(running)]


def rounds(feedback: Feedback, signals: list[EngineSignal], count: int) -> dict[str, float]:
    weights: dict[str, float] = {}
    for _ in range(count):
        for one in signals:
            feedback.heard(one)
        weights = feedback.weights(one.engine for one in signals)
    return weights


def test_equal_engines_keep_equal_weights() -> None:
    assert rounds(Feedback(), loads(5, 5), 10) == pytest.approx({"gpu-0": 0.5, "gpu-1": 0.5})


def test_who_does_better_than_the_average_gets_more_and_ever_more() -> None:
    feedback = Feedback()
    after = [rounds(feedback, loads(4, 16), 1)["gpu-0"] for _ in range(8)]
    assert after == sorted(after)
    assert after[0] > 0.5


def test_a_weight_is_never_nothing() -> None:
    weights = rounds(Feedback(), loads(0, 30), 500)
    assert weights["gpu-1"] == pytest.approx(LEAST / (LEAST + MOST))


def test_it_swings_where_load_answers_late() -> None:
    # each engine's load is what it was given two rounds ago: the loop goes on pushing when it should stop
    feedback, given = Feedback(), [0.7, 0.7, 0.7]
    for _ in range(40):
        signals = loads(round(40 * given[-3]), round(40 * (1 - given[-3])))
        given.append(rounds(feedback, signals, 1)["gpu-0"])
    above = [share > 0.5 for share in given[3:]]
    assert sum(one != after for one, after in pairwise(above)) >= 3


def test_nothing_heard_is_no_reason_to_change() -> None:
    assert Feedback().weights(["a", "b"]) == {"a": 0.5, "b": 0.5}
    assert rounds(Feedback(), loads(0, 0), 3) == pytest.approx({"gpu-0": 0.5, "gpu-1": 0.5})


def test_a_score_is_load_times_and_errors_in_one() -> None:
    slow = signal(ttft=sketch.add(sketch.empty(), 500), tbt=sketch.add(sketch.empty(), 50), running=16, errors=1)
    assert score(slow) == pytest.approx(0.5 + 0.5 + 2 + 5)
    assert score(signal()) == 0


def test_the_hash_follows_the_weights_and_moves_only_what_it_must() -> None:
    a, b, c = places = candidates(3)
    before = {n: hashed(dict(zip(places, (0.5, 0.3, 0.2), strict=True)), str(n)) for n in range(3_000)}
    counts = Counter(before.values())
    assert (counts[a], counts[b], counts[c]) == pytest.approx((1_500, 900, 600), abs=120)
    after = {n: hashed({a: 0.5, b: 0.3}, str(n)) for n in range(3_000)}
    assert all(after[n] == place for n, place in before.items() if place != c)


def test_prompts_that_begin_alike_go_to_the_same_engine() -> None:
    places = candidates(8)
    ingress = Ingress(*(signal(n) for n in range(8)), snapshot=equal(places))
    ingress.policy = EarlierPolicy(ingress.board)
    ingress.policy.follow(equal(places))
    alike = {ingress.pick(n, places, prefix_chain=(1, 2, 3, 4, n)) for n in range(50)}
    assert len(alike) == 1
    others = Counter(choice.shard for n in range(400) if (choice := ingress.pick(n, places)) is not None)
    assert len(others) == 8


def test_it_chooses_only_what_is_eligible_and_says_why() -> None:
    a, b = places = candidates(2)
    ingress = Ingress(signal(0, state="failed"), signal(1))
    ingress.policy = EarlierPolicy(ingress.board)
    ingress.policy.follow(snapshot({a: 0.9, b: 0.1}))
    choice, backup = ingress.pick(1, places), ingress.pick(1, candidates(3), exclude=[b])
    assert choice is not None
    assert (choice.shard, choice.reason) == (1, "weight")
    assert backup is not None
    assert backup.shard != 1


def test_each_pool_keeps_its_share() -> None:
    gpu, cpu = candidates(2, "gpu"), candidates(1, "cpu")
    routes = [
        Route(fleet=place.fleet, shard=place.shard, engine=f"{place.fleet.pool}-{place.shard}", weight=weight)
        for place, weight in zip(gpu + cpu, (0.4, 0.4, 0.2), strict=True)
    ]
    made = reweighed(routes, {"gpu-0": 0.6, "gpu-1": 0.2, "cpu-0": 0.2})
    assert [route.weight for route in made] == pytest.approx([0.6, 0.2, 0.2])
    assert reweighed(routes, dict.fromkeys(("gpu-0", "gpu-1", "cpu-0"), 0.0)) == tuple(routes)


@given(st.lists(st.lists(st.integers(-5, 500), min_size=3, max_size=3), max_size=20))
def test_weights_sum_to_one_whatever_is_heard(heard: list[list[int]]) -> None:
    feedback = Feedback()
    for running in heard:
        weights = rounds(feedback, loads(*running), 1)
        assert sum(weights.values()) == pytest.approx(1)
        assert all(0 < weight < 1 for weight in weights.values())
