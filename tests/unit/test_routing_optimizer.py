"""The optimizer: weights are shares, a ready GPU engine beats the CPU pool, nothing ready is said and not hidden."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_world import MODEL, NOW_MS, fleet, signal

from routing import policy
from routing.optimizer import MAX_FALLBACK, EngineView, Plan, headroom, plan
from routing.penalties import MAX_PENALTY
from routing.profile import Profile
from wire.messages import EngineSignal, Snapshot


def of(*signals: EngineSignal) -> Plan:
    return plan(EngineView(signal=s) for s in signals)


def weights(made: Plan) -> dict[str, float]:
    return {route.engine: route.weight for route in made.routes}


def test_equal_engines_get_equal_shares() -> None:
    assert weights(of(*(signal(n) for n in range(4)))) == pytest.approx({f"gpu-{n}": 0.25 for n in range(4)})


def test_the_engine_with_more_room_gets_more() -> None:
    # (free + 1) / (slots + 1): 17/33 against 25/33
    made = weights(of(signal(0, running=16), signal(1, running=8)))
    assert made == pytest.approx({"gpu-0": 17 / 42, "gpu-1": 25 / 42})


def test_a_queue_costs_but_never_all() -> None:
    full, queued, idle = (headroom(s) for s in (signal(running=32), signal(running=32, queued_requests=33), signal()))
    assert (full, queued, idle) == (1 / 33, 1 / 66, 1.0)


def test_a_faster_engine_gets_more() -> None:
    fast = EngineView(signal=signal(0), profile=Profile(prefill_tokens_per_s=1800.0, decode_tokens_per_s=1500.0))
    slow = EngineView(signal=signal(1), profile=Profile(prefill_tokens_per_s=1000.0, decode_tokens_per_s=1000.0))
    made = weights(plan([fast, slow]))
    assert made["gpu-0"] / made["gpu-1"] == pytest.approx(math.sqrt(1.8 * 1.5))


def test_a_penalty_lowers_a_share() -> None:
    made = weights(plan([EngineView(signal=signal(0), penalty=2.0), EngineView(signal=signal(1))]))
    assert made == pytest.approx({"gpu-0": 0.2, "gpu-1": 0.8})


def test_the_last_engine_is_never_ejected() -> None:
    made = plan([EngineView(signal=signal(0), penalty=MAX_PENALTY), EngineView(signal=signal(1, state="failed"))])
    assert weights(made) == {"gpu-0": 1.0}


def test_only_the_primary_shard_is_routed_to() -> None:
    (route,) = of(signal(shards=(3, 0, 1, 2))).routes
    assert route.shard == 3


def test_of_two_that_claim_a_primary_the_one_heard_later_has_it() -> None:
    old = signal(engine="old", at_ms=NOW_MS - 1500)
    new = signal(engine="new")
    assert weights(of(new, old)) == {"new": 1.0}


def test_an_engine_without_a_shard_gets_nothing() -> None:
    assert of(signal(shards=())).routes == ()


def test_gpu_beats_cpu() -> None:
    made = of(signal(0, running=31), signal(0, "cpu"))
    assert (weights(made), made.fallback) == ({"gpu-0": 1.0}, 0.0)


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


def test_fallback_is_bounded_and_needs_a_free_cpu_slot() -> None:
    flooded = signal(0, running=32, queued_requests=10_000)
    assert of(flooded, signal(0, "cpu")).fallback == MAX_FALLBACK
    assert of(flooded, signal(0, "cpu", running=32)).fallback == 0.0
    assert of(flooded).fallback == 0.0


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
    ),
    penalty=st.floats(0, MAX_PENALTY),
)


@given(st.lists(views, max_size=10))
def test_weights_are_finite_not_negative_and_sum_to_one(engines: list[EngineView]) -> None:
    made = plan(engines)
    policy.check(Snapshot(model=MODEL, region="local", version=0, created_ms=NOW_MS, routes=made.routes))
    assert bool(made.routes) == any(view.signal.state == "ready" for view in engines)
    assert len({(route.fleet, route.shard) for route in made.routes}) == len(made.routes)
    on_cpu = sum(route.weight for route in made.routes if route.fleet == fleet("cpu"))
    assert on_cpu == pytest.approx(made.fallback)
    assert made.why
