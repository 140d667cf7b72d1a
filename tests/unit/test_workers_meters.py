"""What a worker measures of itself: how far ahead of their pace its choices are."""

from __future__ import annotations

from routing_world import signal

from routing.schedule import TARGETS
from wire.clock import ManualClock
from wire.messages import Ref
from workers.engine.protocol import Emission, Key
from workers.meters import Meters


def tokens(ref: int, first: int, count: int, *, end: bool = False) -> Emission:
    return Emission(Key(0, 1, Ref(ref)), 0, first, tuple(range(count)), "", end="stop" if end else None)


def test_batch_is_counted_and_not_timed() -> None:
    clock = ManualClock()
    meters = Meters(clock)
    for _ in range(3):
        meters.emitted(tokens(1, 0, 1), 0.0)
        clock.advance(1_000)
    meters.emitted(tokens(1, 3, 1, end=True), 0.0)
    said = meters.signal(signal())
    assert (said.finished, said.ttft.total, said.tbt.total, said.slacks_ms) == (1, 0, 0, ())


def test_a_choice_gathers_slack_from_its_first_token_on() -> None:
    clock = ManualClock()
    meters = Meters(clock)
    assert meters.signal(signal()).slacks_ms == ()
    meters.emitted(tokens(2, 0, 1), None)
    meters.emitted(tokens(4, 0, 1), None)
    clock.advance(40)
    meters.emitted(tokens(2, 1, 3), None)
    # 3 tokens in 40 ms, and none
    assert meters.signal(signal()).slacks_ms == (-40, round(3 * TARGETS.tbt_ms - 40))
    meters.emitted(tokens(2, 4, 1, end=True), None)
    assert meters.signal(signal()).slacks_ms == (-40,)
    meters.forget(set())
    assert meters.signal(signal()).slacks_ms == ()
    meters.emitted(tokens(6, 0, 1), None)
    meters.died()
    assert meters.signal(signal()).slacks_ms == ()
