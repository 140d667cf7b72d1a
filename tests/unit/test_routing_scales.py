"""The policy's arithmetic in C++ and by arrays: the same choices, whatever is on the board."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_world import MODEL, NOW_MS, STEP, candidates, equal, signal

from routing.board import Board
from routing.native.weigh import LIBRARY
from routing.policy import Plan, Policy, Query
from routing.scales import Weighed

needs_compiler = pytest.mark.skipif(not LIBRARY.possible(), reason="needs a C++ compiler")


def board_of(draw: Random, engines: int, *, trips: bool) -> Board:
    """Engines in all sorts of states, some of them sent to since, some of them blamed."""
    board = Board(block_tokens=64, trips_ms={"local": 40.0} if trips else {})
    for n in range(engines):
        running = draw.choice((0, 3, 20, 32, 40))
        board.heard(
            signal(
                n,
                step=msgspec.structs.replace(
                    STEP,
                    decode_ms=draw.choice((0.0, 8.0, 24.9, 25.0, 60.0)),
                    piece_tokens=draw.choice((64, 2_048, 8_192)),
                ),
                running=running,
                queued_requests=draw.choice((0, 0, 1, 5)),
                queued_tokens=draw.choice((0, 900, 30_000)),
                slacks_ms=tuple(sorted(draw.randrange(-3_000, 9_000) for _ in range(draw.randrange(9)))),
                prefixes_added=tuple(range(draw.randrange(12))),
                prefixes_full=True,
                at_ms=int(NOW_MS) - draw.choice((0, 400, 1_400)),
            )
        )
    for n in range(draw.randrange(3 * engines)):
        shard = candidates(engines)[draw.randrange(engines)]
        board.sent((f"sent-{n}", 1), shard, draw.randrange(1, 9_000), (0, 1, 2), NOW_MS - draw.randrange(300))
        if draw.random() < 0.3:
            board.ended((f"sent-{n}", 1), draw.choice(("answered", "failed")), NOW_MS)
    for _ in range(draw.randrange(100)):
        board.lengths.add(draw.randrange(2_000))
    return board


def both(draw: Random, engines: int, *, relax: float = 0.0, trips: bool = False) -> tuple[Weighed, Weighed, Plan]:
    """By arrays and in C++."""
    board = board_of(draw, engines, trips=trips)
    policy, places = Policy(board), candidates(engines)
    weights = [draw.random() + 0.01 for _ in places]
    snapshot = equal(places)
    routes = tuple(
        msgspec.structs.replace(route, weight=weight / sum(weights))
        for route, weight in zip(snapshot.routes, weights, strict=True)
    )
    policy.follow(msgspec.structs.replace(snapshot, routes=routes))
    query = Query(
        request_id="r",
        model=MODEL,
        candidates=places,
        prompt_tokens=draw.choice((1, 64, 700, 20_000)),
        prefix_chain=tuple(range(draw.randrange(14))),
        waited_ms=draw.choice((0.0, 900.0)),
    )
    assert policy._snapshot is not None
    plan = policy._plan(places, policy._snapshot)
    able = policy._able(query, plan, frozenset())
    assert able is not None
    assert plan.known
    assert policy._scales is not None
    arguments = (query, plan, able, plan.weights, relax, float(NOW_MS))
    return policy._weighed(*arguments), policy._scales.weighed(*arguments), plan


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    engines=st.sampled_from((1, 2, 8, 17, 40)),
    relax=st.sampled_from((0.0, 0.5, 1.0)),
    trips=st.booleans(),
)
def test_both_find_the_same(seed: int, engines: int, relax: float, trips: bool) -> None:
    arrays, native, plan = both(Random(seed), engines, relax=relax, trips=trips)
    assert native.loss == pytest.approx(arrays.loss, rel=1e-9, abs=1e-9)
    assert list(native.blocks) == list(arrays.blocks)
    assert native.most_blocks == arrays.most_blocks
    assert native.busy == pytest.approx(arrays.busy)
    waits_ms = native.waits_ms[plan.alive]
    assert np.allclose(waits_ms, arrays.waits_ms[plan.alive], rtol=1e-12)
    # one that is as far from the least as a tie may be can be either
    assert abs(len(native.tied) - len(arrays.tied)) <= 1
    assert set(native.tied) <= set(arrays.tied) or set(arrays.tied) <= set(native.tied)


@needs_compiler
def test_a_board_that_grew_and_a_new_plan_are_read_anew() -> None:
    board = Board()
    native, arrays = Policy(board), Policy(board, native=False)
    for engines in (3, 9, 20):
        places = candidates(engines)
        for n in range(engines):
            board.heard(signal(n, step=STEP, running=n))
        for policy in (native, arrays):
            policy.follow(equal(places))
        for name in range(10):
            query = Query(request_id=f"{name}", model=MODEL, candidates=places, prompt_tokens=100 * name + 1)
            mine, theirs = native.choose(query, NOW_MS), arrays.choose(query, NOW_MS)
            assert mine is not None
            assert theirs is not None
            assert (mine.shard, mine.reason, mine.cached_tokens) == (theirs.shard, theirs.reason, theirs.cached_tokens)
            assert mine.loss == pytest.approx(theirs.loss)


def test_without_a_compiler_arrays_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("routing.scales.function", lambda: None)
    board = Board()
    board.heard(signal(0, step=STEP))
    policy = Policy(board)
    policy.follow(equal(candidates(1)))
    choice = policy.choose(Query(request_id="r", model=MODEL, candidates=candidates(1)), NOW_MS)
    assert choice is not None
    assert choice.shard == 0
