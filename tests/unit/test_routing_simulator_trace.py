"""Traces that are read, and one that is made up."""

from __future__ import annotations

from itertools import pairwise

from millstream.bench import traces
from routing.simulator.generated import Traffic, generate
from routing.simulator.peers.oracle import bound
from routing.simulator.trace import azure, mooncake


def test_a_mooncake_line_is_a_request() -> None:
    line = '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}'
    (one,) = mooncake([line], speed=2)
    assert (one.number, one.at_ms, one.prompt_tokens, one.output_tokens, one.prefix) == (0, 1_500, 600, 5, (0, 7))


def test_azures_prompts_share_nothing() -> None:
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,600,44",
        "2023-11-16 18:15:47.1805900,0,0",
    ]
    first, second = azure(rows)
    assert (first.at_ms, second.at_ms) == (0, 500)
    assert (first.prefix, second.prefix) == ((0, 1), ())
    assert (second.prompt_tokens, second.output_tokens) == (1, 1)


def test_the_traces_that_come_with_millstream_are_whole() -> None:
    assert len(traces.mooncake()) == 12_031
    assert len(traces.azure()) == 19_366
    assert traces.mooncake(speed=4)[-1].at_ms * 4 == traces.mooncake()[-1].at_ms == 3_536_999


def test_no_router_can_do_better_than_this_on_mooncake() -> None:
    goodput, hit = bound(traces.mooncake())
    assert round(goodput, 3) == 0.995  # 58 prompts take over 2 s alone, whatever is cached
    assert round(hit, 2) == 0.37


def test_sessions_are_the_same_for_the_same_seed() -> None:
    assert generate(300, seed=3) == generate(300, seed=3) != generate(300, seed=4)


def test_a_turn_begins_like_the_one_before_it() -> None:
    talkative = Traffic(sessions_per_s=0.01, turns=20.0, documents=1.0)
    requests = generate(2_000, traffic=talkative, speed=2)
    assert all(one.at_ms <= other.at_ms <= 1_000_000 for one, other in pairwise(requests))
    assert all(len(one.prefix) == -(-one.prompt_tokens // 512) for one in requests)
    sessions: dict[int, list[tuple[int, ...]]] = {}
    for one in requests:
        sessions.setdefault(one.prefix[-2] >> 20, []).append(one.prefix)
    longest = max(sessions.values(), key=len)
    for before, after in pairwise(longest):
        assert after[: len(before) - 1] == before[:-1]
        assert before[-1] not in after or before[-1] & 0xFFFFF < 1_000  # a last piece that isn't full goes on


def test_sessions_share_system_prompts_some_more_than_others() -> None:
    firsts = [one.prefix[0] for one in generate(3_600) if len(one.prefix) > 4]
    ranks = sorted((firsts.count(first) for first in set(firsts)), reverse=True)
    assert ranks[0] > 3 * ranks[5]


def test_a_session_ends_before_its_prompts_get_too_long() -> None:
    short = Traffic(turns=50.0, longest_tokens=5_000)
    assert max(one.prompt_tokens for one in generate(1_000, traffic=short)) <= 5_000
