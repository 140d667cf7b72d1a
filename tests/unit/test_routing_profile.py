"""Profiles: an engine's best, forgotten slowly; an unknown engine is taken for a slow one."""

from __future__ import annotations

import math

import pytest
from routing_world import NOW_MS, signal

from routing.profile import HALF_LIFE_MS, UNMEASURED, Profile, learn, relative_speeds


def test_an_idle_moment_does_not_make_an_engine_slow() -> None:
    busy = learn(UNMEASURED, signal(decode_tokens_per_s=800.0))
    idle = learn(busy, signal(decode_tokens_per_s=20.0, at_ms=NOW_MS + 1000))
    assert idle.decode_tokens_per_s == pytest.approx(800, rel=0.01)


def test_an_engine_that_became_slower_is_noticed() -> None:
    fast = learn(UNMEASURED, signal(decode_tokens_per_s=800.0))
    later = learn(fast, signal(decode_tokens_per_s=300.0, at_ms=NOW_MS + 2 * int(HALF_LIFE_MS)))
    assert later.decode_tokens_per_s == 300.0


def test_a_signal_out_of_order_fades_nothing() -> None:
    profile = Profile(prefill_tokens_per_s=100.0, at_ms=NOW_MS)
    assert learn(profile, signal(prefill_tokens_per_s=50.0, at_ms=NOW_MS - 5000)) == profile


@pytest.mark.parametrize("reported", [None, 0.0, -1.0, math.nan, math.inf])
def test_what_is_no_rate_is_unknown(reported: float | None) -> None:
    assert learn(UNMEASURED, signal(decode_tokens_per_s=reported)).decode_tokens_per_s is None
    known = learn(Profile(decode_tokens_per_s=500.0, at_ms=NOW_MS), signal(decode_tokens_per_s=reported))
    assert known.decode_tokens_per_s == 500.0


def test_a_new_engine_is_taken_for_half_of_the_slowest() -> None:
    known = [Profile(decode_tokens_per_s=1000.0), Profile(decode_tokens_per_s=400.0), UNMEASURED]
    fast, slow, new = (speed**2 for speed in relative_speeds(known))  # of two capacities, one is known
    assert fast / slow == pytest.approx(2.5)
    assert slow / new == pytest.approx(2.0)


def test_both_capacities_count() -> None:
    long_prompts = Profile(prefill_tokens_per_s=9000.0, decode_tokens_per_s=500.0)
    long_answers = Profile(prefill_tokens_per_s=1000.0, decode_tokens_per_s=4500.0)
    one, other = relative_speeds([long_prompts, long_answers])
    assert one == pytest.approx(other)


def test_when_nothing_is_known_all_are_alike() -> None:
    assert relative_speeds([UNMEASURED] * 3) == [1.0, 1.0, 1.0]
    assert relative_speeds([]) == []
