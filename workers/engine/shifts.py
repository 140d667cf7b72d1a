"""What a choice's past and its request do to the scores of single tokens, as arrays that a kernel reads in place."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from wire.messages import Sampling


class Shifts:
    """Kept up token by token, so that no step goes through all that was said before."""

    __slots__ = ("_at", "biased_ids", "biases", "seen_counts", "seen_ids")

    def __init__(self, sampling: Sampling, prompt: Iterable[int]) -> None:
        self.seen_ids, self.seen_counts = array("q"), array("q")
        """tokens that penalties concern, each once, and how often the choice holds them: 0 for the prompt's own"""
        self.biased_ids = array("q", map(int, sampling.logit_bias))
        self.biases = array("d", sampling.logit_bias.values())
        counts = sampling.presence_penalty or sampling.frequency_penalty
        self._at: dict[int, int] | None = {} if counts or sampling.repetition_penalty != 1 else None
        """token → its place among the seen; None if no penalty is asked for"""
        if sampling.repetition_penalty != 1:
            for token in prompt:
                self._add(token, 0)

    def take(self, token: int) -> None:
        """The choice goes on by a token."""
        self._add(token, 1)

    def _add(self, token: int, count: int) -> None:
        if self._at is None:
            return
        at = self._at.setdefault(token, len(self.seen_ids))
        if at == len(self.seen_ids):
            self.seen_ids.append(token)
            self.seen_counts.append(0)
        self.seen_counts[at] += count
