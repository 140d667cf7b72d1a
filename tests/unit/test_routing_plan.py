"""A plan: weights are shares, a ready GPU engine beats the CPU pool, nothing ready is said and not hidden."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_world import MODEL, NOW_MS, STEP, fleet, signal

from routing import policy
from routing.penalties import MAX_PENALTY
from routing.plan import MAX_FALLBACK, EngineView, Network, Plan, Traffic, plan
from routing.profile import Mix, Profile
from wire.messages import EngineSignal, Snapshot


def of(*signals: EngineSignal) -> Plan:
    return plan(EngineView(signal=s) for s in signals)["local"]


def weights(made: Plan) -> dict[str, float]:
    return {route.engine: route.weight for route in made.routes}


def rated(decode: float, prefill: float = 10_000.0) -> Profile:
    return Profile(decode_tokens_per_s=decode, prefill_tokens_per_s=prefill, slots=32, at_ms=NOW_MS)


def test_equal_engines_get_equal_shares() -> None:
    assert weights(of(*(signal(n) for n in range(4)))) == pytest.approx({f"gpu-{n}": 0.25 for n in range(4)})


def test_a_faster_engine_gets_more() -> None:
    views = [EngineView(signal=signal(0), profile=rated(3_000)), EngineView(signal=signal(1), profile=rated(1_500))]
    made = weights(plan(views)["local"])
    assert 1.5 < made["gpu-0"] / made["gpu-1"] < 3


def test_a_new_engine_gets_less_than_the_worst_known() -> None:
    views = [EngineView(signal=signal(n), profile=rated(3_000)) for n in range(2)]
    made = weights(plan([*views, EngineView(signal=signal(2))])["local"])
    assert 0 < made["gpu-2"] < 0.6 * made["gpu-0"]


def test_a_penalty_lowers_a_share() -> None:
    made = weights(plan([EngineView(signal=signal(0), penalty=2.0), EngineView(signal=signal(1))])["local"])
    assert made == pytest.approx({"gpu-0": 0.2, "gpu-1": 0.8}, abs=0.01)


def test_the_last_engine_is_never_ejected() -> None:
    made = plan([EngineView(signal=signal(0), penalty=MAX_PENALTY), EngineView(signal=signal(1, state="failed"))])
    assert weights(made["local"]) == {"gpu-0": 1.0}


def test_only_the_primary_shard_is_routed_to() -> None:
    (route,) = of(signal(shards=(3, 0, 1, 2))).routes
    assert route.shard == 3


def test_of_two_that_claim_a_primary_the_one_heard_later_has_it() -> None:
    old = signal(engine="old", at_ms=NOW_MS - 1500)
    new = signal(engine="new")
    assert weights(of(new, old)) == {"new": 1.0}


def test_an_engine_without_a_shard_gets_nothing() -> None:
    assert of(signal(shards=())).routes == ()


# ---------------------------------------------------------------- the CPU pool


def test_gpu_beats_cpu() -> None:
    made = of(signal(0, running=31), signal(0, "cpu"))
    assert (weights(made), made.fallback, made.why) == ({"gpu-0": 1.0}, 0.0, "the GPU engines serve")


@pytest.mark.parametrize("state", ["loading", "warming", "draining", "failed"])
def test_the_cpu_pool_takes_over_while_no_gpu_engine_is_ready(state: str) -> None:
    made = of(signal(0, state=state), signal(0, "cpu"), signal(1, "cpu"))
    assert weights(made) == pytest.approx({"cpu-0": 0.5, "cpu-1": 0.5})
    assert made.fallback == 1.0
    assert "no GPU engine is ready" in made.why


def test_the_cpu_pool_takes_what_a_full_gpu_pool_lets_wait() -> None:
    # 32 run, 24 wait, 16 may wait: 8 of 56 go elsewhere
    made = of(signal(0, running=32, queued_requests=24), signal(0, "cpu"))
    assert made.fallback == pytest.approx(8 / 56)
    assert weights(made) == pytest.approx({"gpu-0": 48 / 56, "cpu-0": 8 / 56})
    assert "14%" in made.why


def test_fallback_for_queues_is_bounded_and_needs_a_free_cpu_slot() -> None:
    flooded = signal(0, running=32, queued_requests=10_000)
    assert of(flooded, signal(0, "cpu")).fallback == MAX_FALLBACK
    assert of(flooded, signal(0, "cpu", running=32)).fallback == 0.0
    assert of(flooded).fallback == 0.0


def test_the_cpu_pool_takes_what_the_gpu_engines_have_no_room_for() -> None:
    # 3,000 tokens a second and 10,000 of prompts: 1 ÷ (0.1 + 250/3,000) = 5.45 requests a second, and the CPU a quarter
    views = [
        EngineView(signal=signal(0), profile=rated(3_000)),
        EngineView(signal=signal(0, "cpu"), profile=rated(750, 2_500)),
    ]
    traffic = Traffic(demand={"local": 5.6}, mix=Mix(prompt_tokens=1_000, answer_tokens=250))
    made = plan(views, traffic=traffic)["local"]
    assert 0.05 < made.fallback < 0.25
    assert made.shed == {}
    assert "the CPU pool takes" in made.why


# ---------------------------------------------------------------- over capacity


def test_more_than_a_profile_expects_refuses_nobody_while_nothing_waits() -> None:
    views = [EngineView(signal=signal(n), profile=rated(3_000)) for n in range(2)]
    capacity = sum(route.capacity or 0 for route in plan(views)["local"].routes)
    traffic = Traffic(demand={"local": 2 * capacity}, priorities={0: 1.0, 5: 1.0})
    made = plan(views, traffic=traffic)["local"]
    assert made.shed == {}
    assert made.why == "52% more is asked than engines are expected to do"
    seen = plan(views, traffic=replace(traffic, refused={"local": 2.0}))["local"]
    assert seen.why == f"{made.why}; ingresses refuse some"
    assert made.demand == pytest.approx(2 * capacity)
    assert made.prices["request_ms"] > made.prices["latency_ms"]
    assert any(name.startswith("capacity local/gpu/1") for name in made.prices)
    assert sum(weights(made).values()) == pytest.approx(1)


def test_where_requests_wait_as_long_as_they_may_only_what_ends_is_admitted() -> None:
    # 5 end a second at each of two engines, and 50 wait there: 10 s. 20 a second are asked for, so half is refused
    busy = replace(rated(3_000), load=5.0)
    views = [EngineView(signal=signal(n, running=32, queued_requests=50), profile=busy) for n in range(2)]
    traffic = Traffic(demand={"local": 20.0}, priorities={0: 1.0, 5: 3.0})
    made = plan(views, traffic=traffic, patience_ms=10_000)["local"]
    assert made.shed == {0: 1.0, 5: pytest.approx(1 / 3)}
    assert made.why == "requests wait for longer than they may: 50% is refused"


# ---------------------------------------------------------------- regions


def regional() -> list[EngineView]:
    """The worked case: capacities of 100, 100 and 80 requests a second."""
    places = {"a": 100.0, "b": 100.0, "c": 80.0}
    # answers of one token and no prompts: the capacity is the rate
    return [
        EngineView(signal=signal(0, region=region), profile=Profile(decode_tokens_per_s=rate))
        for region, rate in places.items()
    ]


FOUR_MS = Network(trips_ms={("a", "b"): 4.0, ("b", "c"): 4.0, ("a", "c"): 4.0})
ASKED = Traffic(demand={"a": 90.0, "b": 120.0, "c": 40.0}, mix=Mix(prompt_tokens=0, answer_tokens=1))


def test_what_a_region_has_too_much_of_goes_where_there_is_room() -> None:
    made = plan(regional(), ("a", "b", "c"), ASKED, FOUR_MS)
    share = {(region, route.fleet.region): route.weight for region, one in made.items() for route in one.routes}
    assert 20 <= share["b", "c"] * 120 <= 35
    assert share["a", "a"] > 0.95
    assert share["c", "c"] == pytest.approx(1)


def test_the_last_plan_makes_the_next_one_stay() -> None:
    first = plan(regional(), ("a", "b", "c"), ASKED, FOUR_MS)
    again = plan(regional(), ("a", "b", "c"), ASKED, FOUR_MS, first)
    for region in first:
        assert weights(again[region]) == pytest.approx(weights(first[region]), abs=0.02)


def test_a_region_that_may_send_nowhere_has_no_routes_and_says_why() -> None:
    nowhere = Network(forbidden=frozenset({("a", "a"), ("a", "b"), ("a", "c")}))
    made = plan(regional(), ("a", "b"), ASKED, nowhere)
    assert made["a"].routes == ()
    assert made["a"].why == "no engine may serve requests from a"
    assert made["b"].routes


def test_a_region_for_which_there_is_no_room_still_has_routes() -> None:
    only_one = [EngineView(signal=signal(0, region="a"), profile=Profile(decode_tokens_per_s=100.0))]
    far = Network(trips_ms={("a", "b"): 1e6})
    made = plan(only_one, ("a", "b"), Traffic(demand={"a": 500.0, "b": 500.0}, mix=ASKED.mix), far)
    assert weights(made["b"]) == {"a-gpu-0": 1.0}


# ---------------------------------------------------------------- nothing


def test_nothing_ready_is_no_route_and_a_reason() -> None:
    made = of(signal(0, state="loading"), signal(1, state="loading"), signal(0, "cpu", state="failed"))
    assert made == Plan(routes=(), fallback=0.0, why="no engine is ready: 1 failed, 2 loading")
    assert of().why == "no engine has been heard of lately"


views = st.builds(
    EngineView,
    signal=st.builds(
        signal,
        shard=st.integers(0, 6),
        pool=st.sampled_from(["gpu", "cpu"]),
        state=st.sampled_from(["ready", "ready", "loading", "failed"]),
        running=st.integers(-1, 64),
        queued_requests=st.integers(-1, 500),
        slots=st.integers(-1, 64),
        at_ms=st.integers(NOW_MS - 3000, NOW_MS),
    ),
    profile=st.builds(
        Profile,
        prefill_tokens_per_s=st.none() | st.floats(1e-3, 1e6),
        decode_tokens_per_s=st.none() | st.floats(1e-3, 1e6),
        step=st.none() | st.just(STEP),
    ),
    penalty=st.floats(0, MAX_PENALTY),
)


@settings(deadline=None)
@given(st.lists(views, max_size=10), st.floats(0, 1e4))
def test_weights_are_finite_not_negative_and_sum_to_one(engines: list[EngineView], demand: float) -> None:
    made = plan(engines, traffic=Traffic(demand={"local": demand}))["local"]
    policy.check(Snapshot(model=MODEL, region="local", version=0, created_ms=NOW_MS, routes=made.routes))
    assert bool(made.routes) == any(view.signal.state == "ready" for view in engines)
    assert len({(route.fleet, route.shard) for route in made.routes}) == len(made.routes)
    on_cpu = sum(route.weight for route in made.routes if route.fleet == fleet("cpu"))
    assert on_cpu == pytest.approx(made.fallback)
    assert all(0 <= share <= 1 for share in made.shed.values())
    assert made.why


# ---------------------------------------------------------------- versions


def rolled(*versions: str) -> list[EngineView]:
    """An engine of each version, all alike."""
    made = []
    for n, version in enumerate(versions):
        heard = signal(n, at_ms=NOW_MS)
        made.append(EngineView(signal=replace_version(heard, version), profile=rated(3_000)))
    return made


def replace_version(heard: EngineSignal, version: str) -> EngineSignal:
    return msgspec.structs.replace(heard, fleet=msgspec.structs.replace(heard.fleet, version=version))


def shares(made: Plan) -> dict[str, float]:
    """By version."""
    out: dict[str, float] = {}
    for route in made.routes:
        out[route.fleet.version] = out.get(route.fleet.version, 0.0) + route.weight
    return out


@pytest.mark.parametrize("demand", [0.0, 2.0, 4.0])
def test_versions_get_what_their_rollout_allows(demand: float) -> None:
    network, traffic = Network(rollout={"1": 0.9, "2": 0.1}), Traffic(demand={"local": demand})
    made = plan(rolled("1", "2"), traffic=traffic, network=network)["local"]
    assert shares(made) == pytest.approx({"1": 0.9, "2": 0.1}, abs=1e-3)
    assert made.why == "the GPU engines serve"


def test_a_version_that_the_catalogue_lacks_gets_nothing() -> None:
    made = plan(rolled("1", "old"), network=Network(rollout={"1": 1.0}))["local"]
    assert shares(made)["1"] == pytest.approx(1.0)


def test_a_version_without_an_engine_is_named() -> None:
    made = plan(rolled("1"), network=Network(rollout={"1": 0.75, "2": 0.25}))["local"]
    assert made.why == "version 2 gets 25% of the traffic, and no engine of it is ready"
    assert shares(made) == {"1": 1.0}
