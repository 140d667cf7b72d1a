"""Windows: signals fold into snapshots, the silent drop out, and an outage of the log ejects nobody."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_world import MODEL, NOW_MS, signal

from aggregator.windows import SILENT_MS, WINDOW_MS, Windows
from routing import policy, sketch
from routing.earlier import Feedback
from routing.errors import BadSketch
from wire.messages import DemandSignal, EngineSignal, Model, ModelVersion, Signal, Sketch, Snapshot


class World:
    """Windows and a clock: signals come at times."""

    def __init__(self) -> None:
        self.windows = Windows()
        self.now_ms = NOW_MS
        self.offset = 0

    def hear(self, *signals: Signal, after_ms: int = 0) -> None:
        self.now_ms += after_ms
        for one in signals:
            self.windows.hear(one, self.offset, self.now_ms)
            self.offset += 1

    def go_on(self, *signals: Signal, for_ms: int, every_ms: int = 500) -> None:
        """The same signals again and again."""
        for _ in range(for_ms // every_ms):
            self.hear(*signals, after_ms=every_ms)

    def snapshot(self, model: str = MODEL) -> Snapshot:
        (found,) = (s for s in self.windows.snapshots(["local"], self.now_ms) if s.model == model)
        return found

    def routed(self) -> set[str]:
        return {route.engine for route in self.snapshot().routes}


@pytest.fixture
def world() -> World:
    return World()


def alive(**fields: Any) -> DemandSignal:
    """What each ingress says once a second."""
    defaults: dict[str, Any] = {"ingress": "local/0", "slot": 0, "incarnation": "i", "region": "local", "model": ""}
    return DemandSignal(**(defaults | {"at_ms": NOW_MS} | fields))


def seen(*values: float) -> Sketch:
    recorder = sketch.Recorder()
    for value in values:
        recorder.add(value)
    return recorder.take()


def test_a_snapshot_holds_routes_and_what_was_measured(world: World) -> None:
    world.hear(
        signal(0, ttft=seen(100.0), tbt=seen(10.0, 10.0), queued_requests=2, running=3, finished=4),
        signal(1, ttft=seen(300.0), tbt=seen(30.0), finished=4, errors=2),
    )
    made = world.snapshot()
    assert (made.model, made.region, made.version, made.created_ms) == (MODEL, "local", 1, world.now_ms)
    assert {route.engine for route in made.routes} == {"gpu-0", "gpu-1"}
    assert (sketch.mean(made.ttft), made.tbt.total) == (pytest.approx(200), 3)
    assert (made.queued_requests, made.error_rate) == (2, 2 / 8)
    assert made.why == "the GPU engines serve"


def test_each_region_and_each_model_has_its_own(world: World) -> None:
    world.hear(signal(0), signal(0, engine="other", model="other"))
    made = world.windows.snapshots(["here", "there"], world.now_ms)
    assert [(s.model, s.region) for s in made] == [
        (MODEL, "here"),
        (MODEL, "there"),
        ("other", "here"),
        ("other", "there"),
    ]
    assert [{route.engine for route in s.routes} for s in made] == [{"gpu-0"}, {"gpu-0"}, {"other"}, {"other"}]


# ---------------------------------------------------------------- silence


def test_a_silent_engine_drops_out_while_others_are_heard(world: World) -> None:
    world.hear(signal(0), signal(1), alive())
    world.go_on(signal(1), alive(), for_ms=SILENT_MS)
    assert world.routed() == {"gpu-0", "gpu-1"}
    world.go_on(signal(1), alive(), for_ms=1000)
    assert world.routed() == {"gpu-1"}


def test_the_last_engine_drops_out_by_the_ingresses_signals_alone(world: World) -> None:
    world.hear(signal(0), alive())
    world.go_on(alive(), for_ms=SILENT_MS + 1500, every_ms=1000)
    assert world.snapshot().routes == ()
    assert world.snapshot().why == "no engine has been heard of lately"


def test_an_outage_of_the_log_ejects_nobody(world: World) -> None:
    world.hear(signal(0), signal(1), alive())
    world.hear(alive(), after_ms=600_000)  # the ingress is the first to be back
    assert world.routed() == {"gpu-0", "gpu-1"}
    world.go_on(signal(0), alive(), for_ms=SILENT_MS + 500)  # and engine 1 isn't
    assert world.routed() == {"gpu-0"}


def test_control_speaks_only_while_it_listens(world: World) -> None:
    assert not world.windows.listens(world.now_ms)
    world.hear(signal(0))
    assert not world.windows.listens(world.now_ms)  # others may live and weren't heard yet
    world.go_on(signal(0), for_ms=2000)
    assert world.windows.listens(world.now_ms)
    assert not world.windows.listens(world.now_ms + SILENT_MS)


def test_a_clock_that_goes_back_moves_nothing(world: World) -> None:
    world.hear(signal(0), alive())
    world.hear(alive(), after_ms=-60_000)
    assert world.routed() == {"gpu-0"}


# ---------------------------------------------------------------- lives


def test_a_new_life_replaces_the_old_one_at_once(world: World) -> None:
    world.hear(signal(0, incarnation="a"), signal(0, incarnation="b", state="loading"))
    assert world.routed() == set()
    world.hear(signal(0, incarnation="a"))  # a late word of the dead
    assert world.routed() == set()
    world.hear(signal(0, incarnation="b"))
    assert world.routed() == {"gpu-0"}


def test_the_same_name_in_two_fleets_is_two_engines(world: World) -> None:
    world.hear(signal(0, engine="engine-0", incarnation="a"), signal(0, "cpu", engine="engine-0", incarnation="b"))
    assert len(world.windows.engines()) == 2


def test_gpu_beats_cpu_and_cpu_takes_over(world: World) -> None:
    world.hear(signal(0), signal(0, "cpu"))
    assert world.routed() == {"gpu-0"}
    world.hear(signal(0, state="failed"), signal(0, "cpu"))
    assert (world.routed(), world.snapshot().fallback) == ({"cpu-0"}, 1.0)


# ---------------------------------------------------------------- errors


def test_errors_lower_a_weight_and_time_restores_it(world: World) -> None:
    world.hear(signal(0, errors=4, finished=4), signal(1, finished=4))
    weights = {route.engine: route.weight for route in world.snapshot().routes}
    assert weights == pytest.approx({"gpu-0": 1 / 3, "gpu-1": 2 / 3})
    world.go_on(signal(0), signal(1), for_ms=60_000)
    weights = {route.engine: route.weight for route in world.snapshot().routes}
    assert weights == pytest.approx({"gpu-0": 1 / 2, "gpu-1": 1 / 2}, abs=0.01)


def test_the_last_engine_keeps_everything_whatever_its_errors(world: World) -> None:
    for _ in range(50):
        world.hear(signal(0, errors=5))
    assert [route.weight for route in world.snapshot().routes] == [1.0]
    assert world.snapshot().error_rate == 1.0


def test_what_the_ingresses_saw_fail_counts(world: World) -> None:
    world.hear(signal(0, finished=6), alive(model=MODEL, failures=2))
    assert world.snapshot().error_rate == 2 / 8


def test_windows_forget(world: World) -> None:
    world.hear(signal(0, ttft=seen(5.0), errors=1, finished=1))
    world.go_on(alive(), signal(0), for_ms=WINDOW_MS)
    made = world.snapshot()
    assert (made.ttft.total, made.error_rate) == (0, 0.0)
    world.go_on(alive(), for_ms=WINDOW_MS)
    assert world.snapshot().tbt.total == 0


def test_a_broken_sketch_is_refused_whole(world: World) -> None:
    for bad in ({"ttft": Sketch(counts={"x": 1}, total=1)}, {"tbt": Sketch(total=3)}):
        with pytest.raises(BadSketch):
            world.hear(signal(0, **bad))
    assert world.windows.snapshots(["local"], world.now_ms) == []


@given(
    st.lists(
        st.tuples(
            st.builds(
                signal,
                shard=st.integers(0, 3),
                pool=st.sampled_from(["gpu", "cpu"]),
                incarnation=st.sampled_from("abc"),
                state=st.sampled_from(["loading", "ready", "failed"]),
                running=st.integers(-5, 50),
                queued_requests=st.integers(-5, 50),
                finished=st.integers(-5, 5),
                errors=st.integers(-5, 5),
            )
            | st.builds(alive, model=st.sampled_from(["", MODEL]), failures=st.integers(-5, 5)),
            st.integers(-1000, 5000),
        ),
        max_size=40,
    )
)
@settings(deadline=None)
def test_whatever_is_said_snapshots_can_be_followed(said: list[tuple[EngineSignal | DemandSignal, int]]) -> None:
    world, version = World(), -1
    for one, after_ms in said:
        world.hear(one, after_ms=after_ms)
        for made in world.windows.snapshots(["local"], world.now_ms):
            policy.check(made)
            assert 0 <= made.error_rate <= 1
            assert made.version > version
        version = world.offset - 1


# ---------------------------------------------------------------- what sets the weights


def test_a_snapshot_says_what_was_asked_and_what_more_would_cost(world: World) -> None:
    world.hear(signal(0), alive(model=MODEL, requests_per_s=0.4, priorities={"0": 0.4}))
    made = world.snapshot()
    assert made.demand == pytest.approx(0.4)
    assert made.shadow_prices["request_ms"] >= made.shadow_prices["latency_ms"] > 0
    assert all(route.capacity is not None for route in made.routes)


def test_twice_what_ends_is_shed_once_it_waits_for_as_long_as_it_may(world: World) -> None:
    # 10 end in each half second, 20 a second, half of what is asked for; 6,000 wait, as many as end in five minutes
    asked = alive(model=MODEL, requests_per_s=40.0, priorities={"0": 20.0, "1": 20.0})
    for _ in range(120):
        at_ms = world.now_ms + 500
        world.hear(signal(0, running=32, queued_requests=6_000, finished=10, at_ms=at_ms), asked, after_ms=500)
    shed = world.snapshot().shed
    assert (shed["0"], shed.get("1", 0.0)) == pytest.approx((1.0, 0.0), abs=0.05)


def test_the_earlier_designs_feedback_sets_the_weights_where_it_is_asked_to() -> None:
    world = World()
    world.windows = Windows(feedback=Feedback())
    world.go_on(signal(0, running=30), signal(1, running=2), alive(), for_ms=5_000)
    for _ in range(5):
        made = world.snapshot()
    weights = {route.engine: route.weight for route in made.routes}
    assert weights["gpu-1"] > 0.6
    assert sum(weights.values()) == pytest.approx(1)


def test_the_catalogue_says_how_far_a_version_is_rolled_out(world: World) -> None:
    def version(name: str, share: float) -> ModelVersion:
        return ModelVersion(version=name, numerics="sim", pools=("gpu",), regions=("local",), share=share)

    model = Model(
        name=MODEL,
        slug="m",
        owned_by="o",
        created_ms=0,
        context_tokens=1,
        versions=(version(signal().fleet.version, 3.0), version("next", 1.0)),
    )
    world.windows.rolled_out(MODEL, model)
    world.go_on(signal(), for_ms=2_000)
    assert world.snapshot().why == "version next gets 25% of the traffic, and no engine of it is ready"
    world.windows.rolled_out(MODEL, None)
    assert world.snapshot().why == "the GPU engines serve"


def served(world: World, counts: list[tuple[int, int]], seconds: int = 10) -> Snapshot:
    """Two engines that ended so many requests in each window; the last snapshot."""
    for first, second in counts:
        for _ in range(seconds):
            at_ms = world.now_ms + 1_000
            asked = alive(model=MODEL, requests_per_s=float(first + second))
            ended = [
                signal(n, finished=count, ttft=seen(*[100.0] * count), tbt=seen(*[10.0] * 9 * count), at_ms=at_ms)
                for n, count in enumerate((first, second))
            ]
            world.hear(asked, *ended, after_ms=1_000)
            made = world.snapshot()
    return made


def test_a_snapshot_says_what_its_region_asks_and_refuses(world: World) -> None:
    rates = {"model": MODEL, "requests_per_s": 20.0, "refused_per_s": 15.0}
    far = alive(ingress="far/0", region="far", **rates)
    world.hear(signal(0), alive(**rates), alive(**rates, ingress="local/1"), far)
    assert (world.snapshot().demand, world.snapshot().refused_per_s) == (40.0, 30.0)


def test_a_snapshot_says_how_the_shares_swing(world: World) -> None:
    assert served(world, [(5, 5)]).swing is None, "nobody knows yet"
    assert served(world, [(5, 5)] * 4).swing == 0
    assert (served(world, [(9, 1), (1, 9)] * 3).swing or 0) > 0.5


def test_another_set_of_engines_begins_anew(world: World) -> None:
    assert served(world, [(9, 1), (1, 9)] * 3).swing is not None
    world.hear(signal(2), after_ms=500)
    assert world.snapshot().swing is None


def test_a_snapshot_says_what_a_request_took_longer_than_it_had_to(world: World) -> None:
    assert served(world, [(0, 0)]).regret_ms is None
    even, skewed = served(world, [(10, 10)] * 4), served(world, [(20, 0)] * 8)
    assert even.regret_ms is not None
    assert skewed.regret_ms is not None
    assert even.regret_ms < 5
    assert skewed.regret_ms > 50
    assert skewed.regret_ms < 100 + 9 * 10, "a request took no longer in all"
    assert served(world, [(0, 0)] * 9).regret_ms is None


def test_regret_does_not_jump(world: World) -> None:
    served(world, [(10, 10)] * 4)
    seen = [served(world, [(20, 0)], seconds=1).regret_ms or 0.0 for _ in range(30)]
    assert seen == sorted(seen)
    assert max(after - before for before, after in pairwise(seen)) < 10
