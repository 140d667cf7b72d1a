"""What is known of one engine, from its latest signal to now: arithmetic on a few numbers, no I/O.

Between two signals a fluid model holds: prompts that wait are computed one after another, and while they are, the
choices that decode stand still but for a token a piece; otherwise they gain on their pace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from routing.penalties import Penalty
from routing.schedule import PrefillCost
from routing.slack import STANDINS
from wire.fleet import Fleet
from wire.messages import EngineSignal, StepCost

TRUST_MS = 3_000.0
"""The model ends here: after this long without a signal only what was sent is known"""
SENDS = 1_024
"""Sends remembered for an engine: what it gets in seconds, at most"""
PRIOR = StepCost(prefill_fixed_ms=20.0, prefill_token_ms=0.05, decode_ms=20.0)
"""Of an engine that measured nothing yet: slow for a GPU of today, so that it earns its traffic"""
PRIOR_COST = PrefillCost(fixed_ms=PRIOR.prefill_fixed_ms, token_ms=PRIOR.prefill_token_ms)
PRIOR_SLOTS = 32
LEAST_MS = 0.01
"""No step is shorter: what divides by a step's time must stay finite, whatever a signal says"""

Shard = tuple[Fleet, int]
Name = tuple[str, int]
"""An attempt: request id and number"""


class Candidate(NamedTuple):
    """A shard that could serve a request."""

    fleet: Fleet
    shard: int


@dataclass(frozen=True, slots=True)
class Send:
    """A request that was sent to the engine."""

    name: Name | None
    """None for another ingress's"""
    at_ms: float
    new_tokens: float
    """of its prompt, not cached"""
    prompt_tokens: float


class Row:
    """One engine, by its primary shard."""

    __slots__ = (
        "_tbt_ms",
        "at_ms",
        "backlog_ms",
        "cost",
        "decode_ms",
        "decode_token_ms",
        "decoding",
        "each",
        "gained_ms",
        "own",
        "penalty",
        "piece_ms",
        "piece_tokens",
        "rested_ms",
        "room_tokens",
        "sends",
        "shard",
        "signal",
        "slacks_ms",
        "slots",
        "waiting",
    )

    def __init__(self, shard: Shard, tbt_ms: float) -> None:
        """`tbt_ms`: the pace."""
        self.shard = Candidate(*shard)
        self._tbt_ms = tbt_ms
        self.signal: EngineSignal | None = None
        self.at_ms = 0.0
        """what is known was so then"""
        self.backlog_ms = 0.0
        self.waiting = 0.0
        self.decoding = 0.0
        self.slots = float(PRIOR_SLOTS)
        self.own = 0
        """unended attempts of this ingress"""
        self.room_tokens = float("inf")
        self.slacks_ms: Sequence[float] = ()
        """ascending, as the signal had them"""
        self.each = 0.0
        """choices that a slack stands for"""
        self.gained_ms = 0.0
        """by each of them, from the signal until `at_ms`"""
        self.rested_ms = 0.0
        """gathered by each of those that waited at first, since no prompt waits any more: on average"""
        self.penalty = Penalty()
        self.sends: deque[Send] = deque(maxlen=SENDS)
        self.cost = PRIOR_COST
        self.piece_tokens = PRIOR.piece_tokens
        self.piece_ms = PRIOR_COST.ms(PRIOR.piece_tokens)
        self.decode_ms, self.decode_token_ms = PRIOR.decode_ms, PRIOR.decode_token_ms

    @property
    def life(self) -> str | None:
        """The engine's incarnation."""
        return None if self.signal is None else self.signal.incarnation

    @property
    def share(self) -> float:
        """Of the time, spent on prompts while any wait: each piece comes with a decode step."""
        return self.piece_ms / (self.piece_ms + self.decode_ms)

    def offers(self, features: frozenset[str]) -> bool:
        """Whether it has all of these; one that says nothing of them has."""
        return self.signal is None or self.signal.features is None or features.issubset(self.signal.features)

    def restart(self, signal: EngineSignal, travel_ms: float) -> None:
        """As a signal says, and with what was sent since. A send may be missing from it that is `travel_ms` older."""
        running, queued, slots = max(signal.running, 0), max(signal.queued_requests, 0), max(signal.slots, 1)
        queued_tokens = max(signal.queued_tokens, 0)
        self.signal, self.at_ms = signal, signal.at_ms
        self._learn(signal.step or _prior((running + queued) / slots))
        self.decode_ms += self.decode_token_ms * queued_tokens
        self.backlog_ms = self.cost.all_ms(queued_tokens, self.piece_tokens)
        self.waiting, self.decoding, self.slots = queued, running, slots
        if signal.context_tokens is not None:
            self.room_tokens = signal.context_tokens
        self.slacks_ms = (signal.slacks_ms or (0,))[:STANDINS] if running else ()
        self.each = running / len(self.slacks_ms) if running else 0.0
        self.gained_ms = self.rested_ms = 0.0
        while self.sends and self.sends[0].at_ms <= signal.at_ms - travel_ms:
            self.sends.popleft()
        for send in self.sends:
            self._count(send)

    def expect(self, send: Send, travel_ms: float) -> None:
        """A request was sent, unless the signal has it."""
        if self.signal is None or send.at_ms > self.signal.at_ms - travel_ms:
            self.sends.append(send)
            self._count(send)

    def leave(self, name: Name, prompt_tokens: float, answer_tokens: float, *, answered: bool) -> None:
        """An attempt of this ingress is over: one fewer of those that the signal showed, or that came since. The prompt
        of one that wasn't `answered` isn't computed any more."""
        for send in self.sends:
            if send.name == name:
                self.sends.remove(send)
                self.waiting = max(self.waiting - 1, 0.0)
                self._lighten(send.prompt_tokens)
                if not answered:
                    spared_ms = self.cost.all_ms(send.new_tokens, self.piece_tokens)
                    self.backlog_ms = max(self.backlog_ms - spared_ms, 0.0)
                return
        if self.decoding >= 1:
            self.each *= (self.decoding - 1) / self.decoding
            self.decoding -= 1
            self._lighten(prompt_tokens + answer_tokens)

    def weights(self) -> tuple[float, ...]:
        """How many each of the STANDINS slacks stands for, and how many wait: at least what else this ingress has."""
        spoken = len(self.slacks_ms)
        waiting = max(self.waiting, self.own - self.decoding)
        return (*(self.each,) * spoken, *(0.0,) * (STANDINS - spoken), waiting)

    def numbers(self) -> tuple[float, ...]:
        """In the order of the board's columns."""
        cost = self.cost
        return (
            self.at_ms,
            self.backlog_ms,
            self.share,
            self.decode_ms,
            self.decode_token_ms,
            cost.fixed_ms,
            cost.token_ms,
            cost.square_ms,
            self.piece_tokens,
            self.piece_ms,
            self.gained_ms,
            self.rested_ms,
            self.waiting,
            self.decoding,
            self.slots,
            self.own,
            self.room_tokens,
            self.penalty.value,
            self.penalty.at_ms,
        )

    def _count(self, send: Send) -> None:
        """One more waits, from when it was sent."""
        self._pass(send.at_ms)
        self.backlog_ms += self.cost.all_ms(send.new_tokens, self.piece_tokens)
        self.decode_ms += self.decode_token_ms * send.prompt_tokens
        self.rested_ms *= self.waiting / (self.waiting + 1)
        self.waiting += 1

    def _lighten(self, tokens: float) -> None:
        self.decode_ms = max(self.decode_ms - self.decode_token_ms * tokens, LEAST_MS)

    def _pass(self, to_ms: float) -> None:
        """Let time pass, as `Board.state` does over all rows."""
        passed_ms = min(max(to_ms - self.at_ms, 0.0), TRUST_MS)
        stalled_ms = min(passed_ms * self.share, self.backlog_ms)
        self.backlog_ms -= stalled_ms
        self.gained_ms += self.gain_ms(passed_ms, stalled_ms)
        if not self.backlog_ms:
            self.rested_ms += self.gain_ms(passed_ms - stalled_ms / self.share, 0.0)
        self.at_ms = max(to_ms, self.at_ms)

    def gain_ms(self, passed_ms: float, stalled_ms: float) -> float:
        """What a choice gathers in so much time, stalled for a part of it: a token's pace for each step's time."""
        return (passed_ms - stalled_ms) * self._tbt_ms / self.decode_ms - passed_ms

    def _learn(self, step: StepCost) -> None:
        self.cost = PrefillCost(
            fixed_ms=max(step.prefill_fixed_ms, 0.0),
            token_ms=max(step.prefill_token_ms, 0.0),
            square_ms=max(step.prefill_square_ms, 0.0),
        )
        self.piece_tokens = max(step.piece_tokens, 1)
        self.piece_ms = max(self.cost.ms(self.piece_tokens), LEAST_MS)
        self.decode_ms, self.decode_token_ms = max(step.decode_ms, LEAST_MS), max(step.decode_token_ms, 0.0)


def _prior(fullness: float) -> StepCost:
    """Of an engine that didn't say, as full as it is: relative to its slots, which say how large it is."""
    return StepCost(
        prefill_fixed_ms=PRIOR.prefill_fixed_ms,
        prefill_token_ms=PRIOR.prefill_token_ms,
        decode_ms=PRIOR.decode_ms * (1 + fullness),
    )
