"""Guesses: where they come from, when they pay, and what a step with them looks like."""

from __future__ import annotations

import pytest
from engine_world import make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine.generation import Generation
from workers.engine.scheduler import Work
from workers.engine.simulated_vocabulary import SimulatedVocabulary
from workers.engine.speculation import COUNTS, MOST_CHOICES, Gain, Lookup, Speculation

VOCABULARY = SimulatedVocabulary()


class Eager(Gain):
    """Always wants so many."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def best(self, hit_rates: object, rows: int) -> int:
        return self._count

    def worth(self, hit_rate: float) -> bool:
        return True


def choice(prompt: tuple[int, ...], ids: tuple[int, ...] = (), max_tokens: int = 50) -> Generation:
    generation = Generation(make_sequence(prompt=prompt, max_tokens=max_tokens), 0, VOCABULARY)
    generation.ids += ids
    return generation


def next_token(generation: Generation, slot: int = 0) -> Work:
    """The work of one token more."""
    known = [*generation.sequence.prompt, *generation.ids]
    return Work(slot=slot, start=len(known) - 1, ids=(known[-1],), stepwise=True, draws=(generation,))


def test_what_followed_the_last_tokens_before_is_the_guess() -> None:
    assert Lookup((5, 6, 7, 8, 9, 1, 5, 6)).guesses(3) == (7, 8, 9)


def test_longer_matches_come_first_and_then_later_ones() -> None:
    #                 after (1, 2, 3): 7; after (2, 3): 8, later than that 9
    assert Lookup((1, 2, 3, 7, 0, 2, 3, 8, 4, 2, 3, 9, 1, 2, 3)).guesses(1) == (7,)
    assert Lookup((2, 3, 8, 4, 2, 3, 9, 5, 2, 3)).guesses(1) == (9,)


def test_text_that_is_new_gives_no_guess() -> None:
    assert Lookup((1, 2, 3, 4, 5)).guesses(7) == ()
    assert Lookup((1,)).guesses(7) == ()


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), st.integers(1, 20))
def test_what_repeats_itself_is_guessed_to_go_on(unit: list[int], count: int) -> None:
    text = unit * 8
    endless = unit * (8 + count)
    assert Lookup(text).guesses(count) == tuple(endless[len(text) : len(text) + count])


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_taking_tokens_one_by_one_is_taking_them_at_once(prompt: list[int], ids: list[int], pause: int) -> None:
    generation = choice(tuple(prompt) or (1,))
    lookup = Lookup(generation.sequence.prompt)
    for begin in range(0, len(ids), pause):
        generation.ids += ids[begin : begin + pause]
        lookup.catch_up(generation)
    assert lookup.guesses(9) == Lookup((*generation.sequence.prompt, *ids)).guesses(9)


def test_the_hit_rate_follows_what_came_true_without_trying() -> None:
    generation = choice((1, 2, 3) * 3)
    lookup = Lookup(generation.sequence.prompt)
    assert lookup.hit_rate == 0
    generation.ids += [1, 2, 3] * 10
    lookup.catch_up(generation)
    liked = lookup.hit_rate
    assert liked > 0.8
    generation.ids += [9, 1, 2, 8, 1, 2, 7, 1, 2, 6]
    lookup.catch_up(generation)
    assert lookup.hit_rate < liked


def test_nothing_is_guessed_where_guesses_hit_too_seldom() -> None:
    assert Gain().best([0.0], 2) == 0
    assert Gain().best([], 2) == 0
    born = [next_token(choice((1, 2, 3) * 3))]
    assert Speculation().extended(born) == born
    lucky = choice((1, 2, 3) * 3, ids=(1, 2, 3))
    assert Speculation().extended([next_token(lucky)])[0].guesses == COUNTS[-1]


def test_rows_that_were_never_tried_are_tried_and_then_judged_by_their_time() -> None:
    gain = Gain()
    gain.took(1, 10.0)
    assert gain.best([0.9], 1) == COUNTS[-1]
    gain.took(1 + COUNTS[-1], 100.0)  # 1 + 0.9 + 0.9² + … + 0.9⁷ = 5.7 tokens: 17.5 ms each
    assert gain.best([0.9], 1) == 3  # not known yet: as two rows, as one row
    gain.took(4, 40.0)  # 3.4 tokens: 11.6 ms each
    assert gain.best([0.9], 1) == 1
    gain.took(2, 12.0)  # 1.9 tokens: 6.3 ms each
    assert gain.best([0.9], 1) == 1
    assert gain.best([0.1], 1) == 0  # 1.1 tokens: 10.9 ms each
    gain.took(2, 30.0)
    gain.took(2, 30.0)
    assert gain.best([0.9], 1) == 0


def test_a_time_that_is_old_is_forgotten_and_tried_again() -> None:
    gain = Gain()
    for rows in (1, 2, 4, 8):
        gain.took(rows, 10.0 * rows)
    assert gain.best([0.9], 1) == 0
    for _ in range(2_100):
        gain.took(1, 10.0)
    assert gain.best([0.9], 1) > 0


def test_a_step_gets_guesses_after_each_choices_token() -> None:
    speculation = Speculation(Eager(3))
    repeats, new = choice((1, 2, 3) * 3), choice((4, 5, 6))
    first, second = speculation.extended([next_token(repeats), next_token(new, slot=1)])
    assert (first.ids, first.guesses, first.rows) == ((3, 1, 2, 3), 3, 4)
    assert second == next_token(new, slot=1)


@pytest.mark.parametrize(("left", "guesses"), [(1, 0), (2, 1), (4, 3), (9, 7)])
def test_no_guess_reaches_the_last_token_that_is_allowed(left: int, guesses: int) -> None:
    generation = choice((1, 2, 3) * 3, ids=(1, 2, 3), max_tokens=3 + left)
    (item,) = Speculation(Eager(7)).extended([next_token(generation)])
    assert item.guesses == guesses


def test_nothing_is_guessed_beside_prompts_replays_and_among_many() -> None:
    speculation = Speculation(Eager(3))
    repeats = choice((1, 2, 3) * 3)
    piece = Work(slot=1, start=0, ids=(1, 2), stepwise=False)
    replay = Work(slot=1, start=3, ids=(1, 2), stepwise=True)
    many = [next_token(choice((1, 2, 3) * 3), slot) for slot in range(MOST_CHOICES + 1)]
    for work in ([next_token(repeats), piece], [next_token(repeats), replay], many):
        assert speculation.extended(work) == work
