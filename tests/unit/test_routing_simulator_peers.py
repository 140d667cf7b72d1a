"""Published policies choose as their formulas say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from routing.simulator.engine import Engine
from routing.simulator.peers import PEERS
from routing.simulator.peers.affinity import AIBrix, CacheAware, Sticky
from routing.simulator.peers.cost import Dynamo, LMetric
from routing.simulator.peers.load import LeastLoad, PowerOfTwo, Prequal, RoundRobin
from routing.simulator.peers.oracle import Oracle
from routing.simulator.policy import Policy
from routing.simulator.timing import COLD
from routing.simulator.trace import Arrival

PROMPT = Arrival(number=0, at_ms=0.0, prompt_tokens=1_000, output_tokens=50, prefix=(1, 2))


@dataclass
class Seen:
    """An engine as a policy is shown it."""

    in_flight: int = 0
    backlog_tokens: int = 0
    kv_tokens: int = 0
    used_blocks: int = 0
    ttft_ms: float = 0.0
    cached: int = 0

    def cached_tokens(self, prefix: Sequence[int]) -> int:
        return self.cached


def chosen(policy: Policy, *engines: Seen, times: int = 1) -> set[int]:
    return {policy.choose(PROMPT, 0.0, engines) for _ in range(times)}


def test_round_robin_goes_round() -> None:
    policy = RoundRobin()
    assert [policy.choose(PROMPT, 0.0, [Seen()] * 3) for _ in range(4)] == [0, 1, 2, 0]


def test_least_load_breaks_ties_at_random() -> None:
    assert chosen(LeastLoad(), Seen(2), Seen(1), Seen(3)) == {1}
    assert chosen(LeastLoad(), Seen(1), Seen(1), Seen(3), times=50) == {0, 1}


def test_of_two_drawn_the_less_loaded() -> None:
    policy = PowerOfTwo()
    counts = Counter(policy.choose(PROMPT, 0.0, [Seen(9), Seen(1), Seen(5)]) for _ in range(300))
    assert counts[0] == 0
    assert counts[1] > counts[2] > 50
    assert chosen(policy, Seen()) == {0}


def test_prequal_takes_the_quickest_of_the_cold() -> None:
    hot, slow, quick = Seen(9, ttft_ms=1.0), Seen(2, ttft_ms=50.0), Seen(3, ttft_ms=20.0)
    assert chosen(Prequal(), hot, slow, quick) == {2}
    assert chosen(Prequal(), Seen(4, ttft_ms=9), Seen(4, ttft_ms=1), times=50) == {0, 1}


def test_cache_aware_follows_the_cache_until_load_is_uneven() -> None:
    assert chosen(CacheAware(), Seen(60, cached=512), Seen(1)) == {0}
    assert chosen(CacheAware(), Seen(70, cached=512), Seen(1)) == {1}  # 69 apart, and 70 times as many
    assert chosen(CacheAware(), Seen(200, cached=512), Seen(134)) == {0}  # 66 apart, but not 1.5 times as many
    assert chosen(CacheAware(), Seen(2, cached=256), Seen(1)) == {1}  # a quarter of the prompt is too little


def test_aibrix_follows_the_cache_where_no_more_are_than_usual() -> None:
    assert chosen(AIBrix(), Seen(3, cached=512), Seen(2), Seen(3)) == {0}
    assert chosen(AIBrix(), Seen(12, cached=512), Seen(2), Seen(3)) == {1}  # 10 apart
    assert chosen(AIBrix(), Seen(8, cached=512), Seen(1), Seen(2)) == {1}  # over mean + σ = 3.7 + 3.1
    assert chosen(AIBrix(), Seen(3, cached=512), Seen(2, cached=512)) == {1}  # of equal matches the less loaded


def test_llm_d_is_sticky_until_the_first_token_would_be_much_later() -> None:
    assert chosen(Sticky(), Seen(backlog_tokens=20_000, cached=900), Seen()) == {0}
    # 300,000 tokens take about 5.6 s, next to 32 ms
    assert chosen(Sticky(), Seen(backlog_tokens=300_000, cached=900), Seen()) == {1}
    assert chosen(Sticky(), Seen(backlog_tokens=900, cached=700), Seen()) == {1}  # 700 of 1,000 is too little


def test_dynamo_weighs_prefill_against_blocks() -> None:
    # 1,000/64 + 16 new blocks = 31.6 next to 8.1/64 … with half of the prompt cached: 488/64 + 20 + 8 = 35.6
    assert chosen(Dynamo(), Seen(), Seen(cached=512, used_blocks=20)) == {0}
    assert chosen(Dynamo(scale=4.0), Seen(), Seen(cached=512, used_blocks=20)) == {1}  # 78.5 and 58.5


def test_lmetric_multiplies() -> None:
    # 1,000 · (3 + 1) = 4,000 and 488 · (9 + 1) = 4,880
    assert chosen(LMetric(), Seen(used_blocks=3), Seen(used_blocks=9, cached=512)) == {0}
    assert chosen(LMetric(), Seen(used_blocks=4), Seen(used_blocks=9, cached=512)) == {1}


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_chooses_among_idle_engines(name: str) -> None:
    assert chosen(PEERS[name](), Seen(), Seen(), Seen(), times=40) <= {0, 1, 2}


def test_the_oracle_spares_who_would_be_late() -> None:
    engines = [Engine(number, COLD) for number in range(2)]
    almost = Arrival(number=1, at_ms=0.0, prompt_tokens=640, output_tokens=40, prefix=(9,))
    engines[0].add(almost, 0.0)
    for engine in engines:
        engine.advance(60.0)
    long = Arrival(number=2, at_ms=60.0, prompt_tokens=60_000, output_tokens=10, prefix=())
    assert Oracle().choose(long, 60.0, engines) == 1
    engines[1].add(long, 60.0)
    engines[1].advance(100.0)
    assert Oracle().choose(PROMPT, 100.0, engines) == 0
