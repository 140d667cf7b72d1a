"""Guesses of a choice's next tokens from its own text, and when it pays to have the model check them. Pure.

Prompt lookup (Saxena 2023): where the last tokens stood before, what followed then is the guess. The model computes
the guesses as rows of one step and the sampler draws from each row as if it had come by itself, so a guess never
changes a token: it only saves the step of one that it hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from workers.engine.generation import Generation
from workers.engine.rates import Fading
from workers.engine.scheduler import Work

LENGTHS = (4, 3, 2)
"""tokens that must have stood there before, the longest first"""
COUNTS = (1, 3, 7)
"""guesses of one choice in one step"""
MOST_CHOICES = 8
"""more that run together keep the machine busy without guesses: none are looked up then"""
_KEEP_HITS = 0.9
_DOUBT = 2.0
"""misses that a choice is born with"""
_KEEP_TIMES = 0.9
_STALE_STEPS = 2_000
"""after so many steps a time is forgotten: the machine may have become another"""
_LEAST_GAIN = 1.05
_LEAST_RATE = 0.3
"""a choice whose guesses hit less often gets none"""


class Lookup:
    """Where each run of tokens of a choice stood last, and how often what followed would have been right."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}
        self._hits = Fading(_KEEP_HITS, 0.0, _DOUBT)
        self._place: int | None = None
        for token in prompt:
            self._append(token)
        self._place = self._found()

    @property
    def hit_rate(self) -> float:
        """Of the tokens for which there was a guess, the share that it hit; recent ones count more."""
        return self._hits.mean

    def catch_up(self, generation: Generation) -> None:
        """Take what the choice has got since."""
        for token in generation.ids[len(self._tokens) - len(generation.sequence.prompt) :]:
            if self._place is not None:
                self._hits.add(float(self._tokens[self._place] == token))
            self._append(token)
            self._place = self._found()

    def guesses(self, count: int) -> tuple[int, ...]:
        """So many tokens that may come next; none where the text is new. What repeats itself goes on doing so."""
        if self._place is None:
            return ()
        period = len(self._tokens) - self._place
        return tuple(self._tokens[self._place + at % period] for at in range(count))

    def _append(self, token: int) -> None:
        """A place is known by the tokens before it, once something stands there."""
        at = len(self._tokens)
        for length in LENGTHS:
            if at >= length:
                self._follows[tuple(self._tokens[at - length :])] = at
        self._tokens.append(token)

    def _found(self) -> int | None:
        for length in LENGTHS:
            place = self._follows.get(tuple(self._tokens[-length:]))
            if place is not None:
                return place
        return None


class Gain:
    """How many guesses give a token the least time, as far as times are known."""

    def __init__(self) -> None:
        self._ms: dict[int, Fading] = {}
        """rows of a step that only decodes → what it took"""
        self._last: dict[int, int] = {}
        """rows → when that was seen last, in steps"""
        self._steps = 0

    def took(self, rows: int, ms: float) -> None:
        """A step that only decoded so many rows took so long."""
        self._steps += 1
        self._ms.setdefault(rows, Fading(_KEEP_TIMES)).add(ms)
        self._last[rows] = self._steps
        for old in [rows for rows, at in self._last.items() if at <= self._steps - _STALE_STEPS]:
            del self._ms[old], self._last[old]

    def worth(self, hit_rate: float) -> bool:
        """Whether a choice is to have guesses at all."""
        return hit_rate >= _LEAST_RATE

    def best(self, hit_rates: Sequence[float], rows: int) -> int:
        """How many guesses each of these choices is to have in a step of so many rows without them; 0 = none.

        A number of rows that was never tried counts as one that takes no longer than fewer do: so it is tried.
        """
        best, least_ms = 0, self._expected_ms(rows) / rows
        for count in COUNTS if hit_rates else ():
            tokens = rows + sum(_hits(rate, count) for rate in hit_rates)
            token_ms = self._expected_ms(rows + count * len(hit_rates)) / tokens
            if token_ms * _LEAST_GAIN < least_ms:
                best, least_ms = count, token_ms * _LEAST_GAIN
        return best

    def _expected_ms(self, rows: int) -> float:
        known = [seen for seen in self._ms if seen <= rows]
        return self._ms[max(known)].mean if known else 1.0


def _hits(rate: float, count: int) -> float:
    """Guesses that are right before the first that isn't, if each is as likely."""
    return sum(rate**length for length in range(1, count + 1))


class Speculation:
    """Adds guesses to steps, by the times that steps took."""

    def __init__(self, gain: Gain | None = None) -> None:
        self._lookups: dict[Generation, Lookup] = {}
        self._gain = gain or Gain()

    def extended(self, work: Sequence[Work]) -> list[Work]:
        """The same work, with guesses where they are likely to pay: none beside prompts, and none among many."""
        if len(work) > MOST_CHOICES or not all(_decodes(item) for item in work):
            return list(work)
        guessing = self._guessing(work)
        count = self._gain.best([lookup.hit_rate for lookup in guessing.values()], len(work))
        return [self._with_guesses(item, guessing.get(item.draws[0]), count) for item in work]

    def took(self, work: Sequence[Work], ms: float) -> None:
        """A step took so long."""
        if all(item.stepwise for item in work):
            self._gain.took(sum(len(item.ids) for item in work), ms)

    def _guessing(self, work: Sequence[Work]) -> dict[Generation, Lookup]:
        """The choices for which there is a guess, and one that may well hit."""
        choices = [item.draws[0] for item in work]
        self._lookups = {c: self._lookups.get(c) or Lookup(c.sequence.prompt) for c in choices}
        for choice, lookup in self._lookups.items():
            lookup.catch_up(choice)
        return {
            choice: lookup
            for choice, lookup in self._lookups.items()
            if lookup.guesses(1) and self._gain.worth(lookup.hit_rate)
        }

    def _with_guesses(self, item: Work, lookup: Lookup | None, count: int) -> Work:
        """No guess reaches the last token that is allowed: nothing would be drawn after it."""
        (choice,) = item.draws
        guesses = () if lookup is None else lookup.guesses(min(count, _room(choice)))
        return replace(item, ids=item.ids + guesses, guesses=len(guesses)) if guesses else item


def _decodes(item: Work) -> bool:
    return item.stepwise and len(item.ids) == 1 and len(item.draws) == 1


def _room(choice: Generation) -> int:
    return choice.sequence.max_tokens - len(choice.ids) - 1
