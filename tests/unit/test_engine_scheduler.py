"""Who runs when, and what a step computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_world import LIMITS, make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.protocol import Key, Restored, Sequence
from workers.engine.scheduler import Limits, Scheduler, Work
from workers.engine.simulated_vocabulary import SimulatedVocabulary


def scheduler(limits: Limits = LIMITS) -> Scheduler:
    return Scheduler(limits, SimulatedVocabulary())


def started(of: Scheduler) -> list[int]:
    return [group.sequence.key.ref for group in of.admit()]


def step(of: Scheduler, *, token: int = 300) -> list[Work]:
    """Plan and compute a step; each drawn token is the same word."""
    work = of.plan()
    of.ran(work)
    for item in work:
        for generation in item.draws:
            if generation.take(token, None).end is not None:
                of.end(generation)
    return work


def prompt(length: int) -> tuple[int, ...]:
    return tuple(range(length))


def test_first_come_first_served_and_batch_last() -> None:
    mine = scheduler()
    for ref, batch in ((1, True), (2, False), (3, False), (4, True), (5, False), (6, False)):
        mine.add(make_sequence(ref, batch=batch))
    assert started(mine) == [2, 3, 5, 6]
    mine.cancel(Key(0, 1, 3))
    mine.cancel(Key(0, 1, 5))
    assert started(mine) == [1, 4]


def test_n_choices_take_n_slots_and_wait_for_them_in_turn() -> None:
    mine = scheduler()
    for ref, n in ((1, 2), (2, 3), (3, 1)):
        mine.add(make_sequence(ref, n=n))
    assert started(mine) == [1]  # 2 of 4 taken; 3 don't fit, and the third doesn't overtake
    mine.cancel(Key(0, 1, 1))
    assert started(mine) == [2, 3]
    assert mine.load().running == 4


def test_admission_counts_prompt_and_answer_in_full() -> None:
    mine = scheduler(replace(LIMITS, kv_tokens=100))
    mine.add(make_sequence(1, prompt(40), max_tokens=20))  # 60
    mine.add(make_sequence(2, prompt(20), max_tokens=21))  # 41: together 101
    assert started(mine) == [1]
    assert (mine.load().kv_used_tokens, mine.load().kv_total_tokens) == (60, 100)
    mine.cancel(Key(0, 1, 1))
    assert started(mine) == [2]


def test_a_suspect_runs_with_nothing_beside_it() -> None:
    mine = scheduler()
    mine.add(make_sequence(1))
    mine.add(make_sequence(2, alone=True, n=2))
    mine.add(make_sequence(3))
    assert started(mine) == [1]
    mine.cancel(Key(0, 1, 1))
    assert started(mine) == [2]
    assert started(mine) == []
    mine.cancel(Key(0, 1, 2))
    assert started(mine) == [3]


def test_a_prompt_is_computed_in_pieces_at_fixed_positions_whatever_runs_beside_it() -> None:
    def pieces(of: Scheduler) -> list[tuple[int, int]]:
        work = [item for _ in range(30) for item in step(of)]
        return [(item.start, len(item.ids)) for item in work if not item.stepwise and item.ids[0] >= 100]

    alone, crowded = scheduler(), scheduler()
    wanted = make_sequence(9, range(100, 140), max_tokens=2)
    alone.add(wanted)
    for ref, length in ((1, 7), (2, 30), (3, 1)):
        crowded.add(make_sequence(ref, prompt(length)))
    crowded.add(wanted)
    assert pieces(alone) == pieces(crowded) == [(0, 16), (16, 16), (32, 8)]


def test_a_step_decodes_everything_that_runs_and_prefills_within_its_budget() -> None:
    mine = scheduler()
    mine.add(make_sequence(1, prompt(3)))
    step(mine)
    for ref, length in ((2, 10), (3, 7), (4, 6)):
        mine.add(make_sequence(ref, prompt(length)))
    sizes = [(item.stepwise, len(item.ids)) for item in step(mine)]
    assert sizes == [(True, 1), (False, 10), (False, 6)]  # 10 + 7 exceed 16; 10 + 6 don't
    sizes = [(item.stepwise, len(item.ids)) for item in step(mine)]
    assert sizes == [(True, 1), (True, 1), (True, 1), (False, 7)]


def test_a_step_computes_as_few_prompt_tokens_as_it_is_told_and_in_that_order() -> None:
    mine = scheduler(replace(LIMITS, step_tokens=64))
    for ref, length in ((1, 10), (2, 20), (3, 12)):
        mine.add(make_sequence(ref, prompt(length)))
    mine.admit()
    one, two, three = (p.key for p in mine.prompts())
    assert mine.plan(0) == []
    assert [len(item.ids) for item in mine.plan(30, [three, two, one])] == [12, 16]
    assert [len(item.ids) for item in mine.plan(1, [two])] == [16], "the first piece is whole"
    mine.ran(mine.plan(16, [two]))
    assert [(p.key.ref, p.tokens) for p in mine.prompts()] == [(1, 10), (2, 4), (3, 12)]
    assert (mine.held_tokens(), list(mine.waiting())) == (16, [])
    assert mine.load().waiting_tokens == 26


def test_the_choices_of_a_request_share_its_prompt() -> None:
    mine = scheduler()
    mine.add(make_sequence(1, prompt(20), n=3))
    first, last = step(mine), step(mine)
    assert [(item.start, item.copies, len(item.draws)) for item in first + last] == [
        (0, (), 0),
        (16, tuple(g.slot for g in list(mine.running())[1:]), 3),
    ]
    assert [(item.start, len(item.ids)) for item in step(mine)] == [(20, 1)] * 3


def test_a_restored_choice_computes_its_prompt_as_before_and_its_tokens_step_by_step() -> None:
    mine = scheduler()
    mine.add(make_sequence(1, prompt(5), max_tokens=40, restored=(Restored(tuple(range(30))),)))
    work = [step(mine)[0] for _ in range(4)]
    assert [(item.stepwise, item.start, len(item.ids), len(item.draws)) for item in work] == [
        (False, 0, 5, 0),
        (True, 5, 16, 0),
        (True, 21, 14, 1),
        (True, 35, 1, 1),
    ]


def test_choices_that_are_complete_are_not_run_again() -> None:
    mine = scheduler()
    ended = Restored((300,), "stop")
    mine.add(make_sequence(1, n=2, restored=(ended, Restored((301,)))))
    assert mine.settled() == []
    assert [generation.choice for group in mine.admit() for generation in group.generations] == [1]
    mine.add(make_sequence(2, restored=(ended,)))
    assert started(mine) == []


def test_a_restored_choice_with_all_its_tokens_only_ends() -> None:
    mine = scheduler()
    mine.add(make_sequence(1, max_tokens=2, restored=(Restored((300, 301)),)))
    assert [(emission.first, emission.ids, emission.end) for emission in mine.settled()] == [(2, (), "length")]
    assert not mine.busy()


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        (make_sequence(1, ()), "no tokens"),
        (make_sequence(1, (10**6,)), "token id outside"),
        (make_sequence(1, (-1,)), "token id outside"),
        (make_sequence(1, max_tokens=0), "at least 1"),
        (make_sequence(1, max_tokens=94), "97 tokens together; the context holds 96"),
        (make_sequence(1, n=5), "fewer"),
        (make_sequence(1, n=2, restored=(Restored(()),)), "restored"),
        (make_sequence(1, logit_bias={"999999": 1.0}), "logit_bias"),
        (make_sequence(1, logit_bias={"-1": 1.0}), "logit_bias"),
        (make_sequence(1, temperature=float("nan")), "sampling"),
        (make_sequence(1, repetition_penalty=0.0), "sampling"),
    ],
)
def test_what_can_never_run_fails_alone(sequence: Sequence, words: str) -> None:
    mine = scheduler()
    mine.add(make_sequence(2))
    mine.add(sequence)
    (emission,) = mine.settled()
    assert emission.key == sequence.key
    assert words in (emission.error or "")
    assert started(mine) == [2]


def test_dropping_an_epoch_forgets_all_of_it_and_nothing_else() -> None:
    mine = scheduler()
    keys = [Key(0, 1, 1), Key(0, 2, 2), Key(1, 1, 3), Key(0, 1, 4), Key(0, 1, 5), Key(0, 2, 6)]
    for key in keys:
        mine.add(make_sequence(key.ref, key=key))
    mine.admit()
    mine.add(make_sequence(7, (), key=Key(0, 1, 7)))
    mine.drop(0, 1)
    assert mine.settled() == []
    assert started(mine) == [6]
    assert sorted(generation.sequence.key.ref for generation in mine.running()) == [2, 3, 6]


OPERATIONS = st.lists(st.one_of(st.integers(1, 12).map(lambda ref: ("cancel", ref)), st.just(("step", 0))), max_size=60)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 4), st.booleans(), st.booleans()), max_size=12
    ),
    OPERATIONS,
)
def test_slots_and_kv_never_leak(
    shapes: list[tuple[int, int, int, bool, bool]], operations: list[tuple[str, int]]
) -> None:
    mine = scheduler(replace(LIMITS, kv_tokens=200))
    for ref, (length, max_tokens, n, alone, batch) in enumerate(shapes, start=1):
        mine.add(make_sequence(ref, prompt(length), max_tokens, n=n, alone=alone, batch=batch))
    mine.settled()
    for name, ref in operations:
        if name == "cancel":
            mine.cancel(Key(0, 1, ref))
        else:
            step(mine)
        slots = [generation.slot for generation in mine.running()]
        assert len(set(slots)) == len(slots) == mine.load().running <= LIMITS.slots
        assert mine.load().kv_used_tokens <= 200
        groups = {generation.sequence.key for generation in mine.running()}
        assert len(groups) == 1 or not any(generation.sequence.alone for generation in mine.running())
    for _ in range(1000):
        if not mine.busy():
            break
        assert step(mine), "something waits and nothing is computed"
    assert (mine.load().running, mine.load().waiting, mine.load().kv_used_tokens) == (0, 0, 0)
