"""Batch makes room for interactive requests, and the prefix cache in the scheduler: every plan, whatever comes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import msgspec
from engine_world import LIMITS, Transcript, make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.lanes import MOST_YIELDS
from workers.engine.protocol import Emission, Key, Restored, Sequence
from workers.engine.scheduler import Scheduler, Work
from workers.engine.simulated_vocabulary import SimulatedVocabulary

ROOM = replace(LIMITS, prefix_blocks=6)


class Bench:
    """A scheduler whose engine computes tokens from what the slot's KV was made of, so that a wrong one shows.

    A slot's KV is the list of (token, how it was computed); so is a block's. A token is a function of all of it.
    """

    def __init__(self, limits: object = ROOM) -> None:
        self.scheduler = Scheduler(limits, SimulatedVocabulary())  # type: ignore[arg-type]
        self.slots: defaultdict[int, list[object]] = defaultdict(list)
        self.blocks: dict[int, list[object]] = {}
        self.work: list[Work] = []
        self.computed = 0

    def step(self) -> list[Emission]:
        emissions = self.scheduler.settled()
        self.work = self.scheduler.plan()
        for item in self.work:
            begin = item.start - sum(len(self.blocks[block]) for block in item.loads)
            self.slots[item.slot][begin:] = [entry for block in item.loads for entry in self.blocks[block]]
        for item in self.work:
            self.compute(item)
        self.scheduler.ran(self.work)
        for item in self.work:
            emissions += [self.draw(generation) for generation in item.draws]
        return self.scheduler.counted(emissions)

    def compute(self, item: Work) -> None:
        kv = self.slots[item.slot]
        assert len(kv) >= item.start, "nothing before it is missing"
        how: object = "step" if item.stepwise else (item.start, len(item.ids))
        kv[item.start :] = [(token, how) for token in item.ids]
        self.computed += len(item.ids)
        if item.save is not None:
            self.blocks[item.save] = kv[item.start :]
        for copy in item.copies:
            self.slots[copy][:] = kv

    def draw(self, generation: object) -> Emission:
        seen = self.slots[generation.slot][: generation.computed]  # type: ignore[attr-defined]
        token = 256 + hash((tuple(seen), generation.choice)) % 90  # type: ignore[attr-defined]
        emission: Emission = generation.take(token, None)  # type: ignore[attr-defined]
        if emission.end is not None:
            self.scheduler.end(generation)  # type: ignore[arg-type]
        return emission

    def empty(self) -> bool:
        load = self.scheduler.load()
        return (load.running, load.waiting, load.kv_used_tokens, load.waiting_tokens) == (0, 0, 0, 0)


def told(bench: Bench, *sequences: Sequence, steps: int = 2_000) -> dict[tuple[int, int], list[int]]:
    transcript = Transcript()
    for sequence in sequences:
        bench.scheduler.add(sequence)
    for _ in range(steps):
        if not bench.scheduler.busy():
            return {at: choice.ids for at, choice in transcript.choices.items()}
        transcript.take(bench.step())
    raise AssertionError("it doesn't come to an end")


def running(bench: Bench) -> list[int]:
    bench.scheduler.admit()
    return sorted(key.ref for key in bench.scheduler.running_keys())


def test_batch_gives_its_slots_up_and_goes_on_where_it_was() -> None:
    bench, transcript = Bench(), Transcript()
    batch = [make_sequence(ref, range(ref, ref + 20), max_tokens=12, batch=True) for ref in range(4)]
    for sequence in batch:
        bench.scheduler.add(sequence)
    for _ in range(8):
        transcript.take(bench.step())
    bench.scheduler.add(make_sequence(9, max_tokens=3))
    assert running(bench) == [0, 1, 2, 9], "the one that has computed least"
    while bench.scheduler.busy():
        transcript.take(bench.step())
    assert bench.empty()
    for sequence in batch:
        assert transcript.choices[sequence.key.ref, 0].ids == told(Bench(), sequence)[sequence.key.ref, 0]


def test_as_many_as_are_needed_give_way_and_none_if_that_would_not_help() -> None:
    bench = Bench()
    for ref in range(3):
        bench.scheduler.add(make_sequence(ref, batch=True))
    bench.scheduler.add(make_sequence(3))
    assert running(bench) == [0, 1, 2, 3]
    bench.scheduler.add(make_sequence(4, n=4))
    assert running(bench) == [0, 1, 2, 3], "an interactive request gives nothing up, so 4 slots can't be had"
    bench.scheduler.cancel(Key(0, 1, 4))
    bench.scheduler.add(make_sequence(5, n=2))
    assert running(bench) == [0, 3, 5], "those that came last"


def test_batch_makes_room_in_the_kv_too() -> None:
    bench = Bench(replace(ROOM, kv_tokens=100))
    bench.scheduler.add(make_sequence(0, range(40), max_tokens=20, batch=True))
    assert running(bench) == [0]
    bench.scheduler.add(make_sequence(1, range(30), max_tokens=20))
    assert running(bench) == [1]
    assert bench.scheduler.load().kv_used_tokens == 50


def test_batch_never_makes_room_for_batch_and_keeps_its_turn() -> None:
    bench = Bench()
    for ref in range(6):
        bench.scheduler.add(make_sequence(ref, batch=True, n=2 if ref == 5 else 1))
    assert running(bench) == [0, 1, 2, 3]
    bench.scheduler.add(make_sequence(9))
    assert running(bench) == [0, 1, 2, 9]
    assert [key.ref for key in bench.scheduler.waiting()] == [3, 4, 5]


def test_a_request_makes_room_a_few_times_at_most() -> None:
    bench = Bench(replace(ROOM, slots=1))
    bench.scheduler.add(make_sequence(0, batch=True, max_tokens=50))
    assert running(bench) == [0]
    for ref in range(1, MOST_YIELDS + 1):
        bench.scheduler.add(make_sequence(ref))
        assert running(bench) == [ref]
        bench.scheduler.cancel(Key(0, 1, ref))
        assert running(bench) == [0]
    bench.scheduler.add(make_sequence(9))
    assert running(bench) == [0]


def test_a_suspect_of_the_batch_lane_makes_room_too() -> None:
    bench = Bench()
    bench.scheduler.add(make_sequence(0, batch=True, alone=True))
    assert running(bench) == [0]
    bench.scheduler.add(make_sequence(1))
    assert running(bench) == [1]
    bench.scheduler.add(make_sequence(2, alone=True))
    assert running(bench) == [1]
    bench.scheduler.cancel(Key(0, 1, 1))
    assert running(bench) == [2]


def test_prompts_that_begin_alike_are_computed_once() -> None:
    bench = Bench()
    shared = range(64)
    answers = told(bench, *(make_sequence(ref, (*shared, 100 + ref), max_tokens=3) for ref in range(4)))
    assert bench.computed == 64 + 4 * 1 + 4 * 2, "the shared part, each one's last prompt token, its two answer tokens"
    for ref in range(4):
        assert answers[ref, 0] == told(Bench(LIMITS), make_sequence(ref, (*shared, 100 + ref), max_tokens=3))[ref, 0]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    bench = Bench()
    sequence = make_sequence(1, range(32), max_tokens=2)
    first = told(bench, sequence)
    bench.scheduler.add(sequence)
    emission = bench.step()[0]
    assert (emission.cached_tokens, list(emission.ids)) == (16, first[1, 0][:1])
    assert [(item.start, len(item.ids), len(item.loads)) for item in bench.work] == [(16, 16, 1)]


def test_cached_tokens_are_said_once_and_only_of_the_first_computing() -> None:
    bench = Bench(replace(ROOM, slots=1))
    batch = make_sequence(1, range(40), max_tokens=6, batch=True, n=1)
    bench.scheduler.add(batch)
    said = [emission.cached_tokens for _ in range(4) for emission in bench.step()]
    bench.scheduler.add(make_sequence(2, max_tokens=1))
    while bench.scheduler.busy():
        said += [emission.cached_tokens for emission in bench.step()]
    assert bench.work[0].stepwise
    assert said == [None] * 7, "computed anew from the cache after it made room, and yet it counts none"
    bench.scheduler.add(msgspec.structs.replace(batch, key=Key(0, 1, 3), n=1))
    assert [emission.cached_tokens for _ in range(3) for emission in bench.step()][:2] == [32, None]


def test_choices_count_their_prompt_once() -> None:
    bench = Bench()
    told(bench, make_sequence(1, range(20), max_tokens=1))
    bench.scheduler.add(make_sequence(2, range(20), max_tokens=2, n=3))
    assert [emission.cached_tokens for emission in bench.step()] == [16, None, None]


def test_a_prompt_on_its_way_counts_what_the_cache_has_as_done() -> None:
    bench = Bench()
    told(bench, make_sequence(1, range(64), max_tokens=1))
    bench.scheduler.add(make_sequence(2, range(70), max_tokens=1))
    bench.scheduler.admit()
    assert [prompt.tokens for prompt in bench.scheduler.prompts()] == [6]


def test_interactive_prompts_come_before_what_batch_makes_up_for() -> None:
    bench = Bench()
    restored = (Restored(tuple(range(60))),)
    bench.scheduler.add(make_sequence(1, (5,), max_tokens=70, batch=True, restored=restored))
    bench.scheduler.add(make_sequence(2, (6,), max_tokens=70, restored=restored))
    bench.step()
    bench.scheduler.add(make_sequence(3, range(10)))

    def computed() -> list[tuple[bool, int]]:
        bench.step()
        return [(item.stepwise, len(item.ids)) for item in bench.work]

    assert [computed() for _ in range(5)] == [
        *([[(True, 16)]] * 3),  # of the interactive one's 60; the prompt's 10 don't fit beside the first 16
        [(True, 12), (True, 4)],  # nor in what is left now
        [(True, 1), (False, 10), (True, 6)],
    ]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, 3),  # which beginning
            st.integers(1, 50),  # prompt tokens
            st.integers(1, 12),  # answer tokens
            st.integers(1, 3),  # choices
            st.booleans(),  # batch
            st.sampled_from("ab"),  # tenant
        ),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(ACTIONS, st.integers(0, 8), st.integers(40, 4 * 96))
def test_whatever_comes_every_answer_is_that_of_a_run_alone_and_nothing_leaks(
    actions: list[tuple[object, ...]], blocks: int, kv_tokens: int
) -> None:
    limits = replace(LIMITS, prefix_blocks=blocks, kv_tokens=kv_tokens)
    bench, transcript = Bench(limits), Transcript()
    added: dict[int, Sequence] = {}
    cancelled: set[int] = set()
    for action in actions:
        match action:
            case ("add", int(begin), int(length), int(answer), int(n), bool(batch), str(tenant)):
                prompt = (*([begin] * (length // 2)), *range(length - length // 2))
                sequence = make_sequence(len(added), prompt, answer, n=n, batch=batch, tenant=tenant)
                added[len(added)] = sequence
                bench.scheduler.add(sequence)
            case ("cancel", int(ref)):
                cancelled |= {ref} & added.keys()
                bench.scheduler.cancel(Key(0, 1, ref))  # type: ignore[arg-type]
            case ("step", int(count)):
                for _ in range(count):
                    transcript.take(bench.step())
    for _ in range(3_000):
        transcript.take(bench.step())
        if not bench.scheduler.busy():
            break
    assert bench.empty()
    for ref in added.keys() - cancelled:
        alone = told(Bench(replace(limits, prefix_blocks=0)), added[ref])
        assert alone == {at: choice.ids for at, choice in transcript.choices.items() if at[0] == ref}
