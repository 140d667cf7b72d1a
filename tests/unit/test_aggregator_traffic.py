"""What is asked of a model: the sum over the ingresses that are heard."""

from __future__ import annotations

import math
from typing import Any

import pytest
from routing_world import MODEL, NOW_MS

from aggregator.traffic import SILENT_MS, Asked
from routing.plan import TYPICAL
from routing.profile import Mix
from wire.messages import DemandSignal


def demand(ingress: str = "here/0", **fields: Any) -> DemandSignal:
    known: dict[str, Any] = {"slot": 0, "incarnation": "i", "model": MODEL, "at_ms": NOW_MS}
    return DemandSignal(**({"ingress": ingress, "region": ingress.partition("/")[0]} | known | fields))


def test_ingresses_add_up_by_region_and_their_latest_word_counts() -> None:
    asked = Asked()
    asked.hear(demand("here/0", requests_per_s=100.0), 0)
    asked.hear(demand("here/0", requests_per_s=5.0, tokens_per_s=1_000.0, prompt_tokens_per_s=9_000.0), 500)
    asked.hear(demand("here/1", requests_per_s=4.0, priorities={"0": 3.0, "-2": 1.0}), 500)
    asked.hear(demand("there/0", requests_per_s=1.0, priorities={"0": 1.0, "oops": 9.0}), 500)
    asked.hear(demand("there/0", model="other", requests_per_s=50.0), 500)
    traffic = asked.of(MODEL, 1_000)
    assert dict(traffic.demand) == {"here": 9.0, "there": 1.0}
    assert traffic.mix == Mix(prompt_tokens=900, answer_tokens=100)
    assert dict(traffic.priorities) == {0: 4.0, -2: 1.0}


def test_refused_requests_are_asked_and_have_no_lengths() -> None:
    """Else refusing would make the demand seem small, and so stop itself."""
    asked = Asked()
    rates = {"requests_per_s": 20.0, "refused_per_s": 15.0, "tokens_per_s": 500.0, "prompt_tokens_per_s": 4_500.0}
    asked.hear(demand("here/0", **rates, priorities={"-1": 15.0, "0": 5.0}), 0)
    asked.hear(demand("there/0", requests_per_s=5.0, refused_per_s=math.nan, tokens_per_s=500.0), 0)
    traffic = asked.of(MODEL, 0)
    assert dict(traffic.demand) == {"here": 20.0, "there": 5.0}
    assert dict(traffic.refused) == {"here": 15.0, "there": 0.0}
    assert dict(traffic.priorities) == {-1: 15.0, 0: 5.0}
    assert traffic.mix == Mix(prompt_tokens=450, answer_tokens=100)


def test_a_silent_ingress_asks_nothing() -> None:
    asked = Asked()
    asked.hear(demand("here/0", requests_per_s=5.0), 0)
    asked.hear(demand("here/1", requests_per_s=2.0), SILENT_MS)
    assert asked.of(MODEL, SILENT_MS + 1).demand == {"here": 2.0}
    asked.forget(SILENT_MS + 1)
    assert asked.of(MODEL, SILENT_MS).demand == {"here": 2.0}


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -3.0, 0.0])
def test_what_is_no_rate_counts_as_none_and_lengths_are_typical(value: float | None) -> None:
    asked = Asked()
    asked.hear(demand(requests_per_s=value, tokens_per_s=value, prompt_tokens_per_s=value), 0)
    traffic = asked.of(MODEL, 0)
    assert (dict(traffic.demand), traffic.mix) == ({"here": 0.0}, TYPICAL)


def test_the_proof_of_life_asks_nothing() -> None:
    asked = Asked()
    asked.hear(demand(model="", requests_per_s=1.0), 0)
    assert asked.of("", 0).demand == {}
