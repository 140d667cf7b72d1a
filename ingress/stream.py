"""Frames of one request → each token once, in order, never contradicting what a client saw (R7). Pure.

Frames can be lost (replies are acknowledged by the leader only), doubled, and sent by a former owner. The rules:

1. Only the current attempt counts, and of it only the highest epoch seen.
2. The first Delta of a choice in an epoch starts at position 0; it is compared with what was delivered.
3. What continues exactly is delivered. What is known is dropped. Anything else is a Gap: the owner must send all
   from position 0 again.
4. What differs from what was delivered is Broken: nothing more can be delivered.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from io import StringIO

from wire.messages import Accepted, ChoiceEnd, Delta, End, Entry, Refused


@dataclass(frozen=True, slots=True)
class Gap:
    """Something is missing; an Attach brings it."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The owner contradicts what was delivered, or itself."""

    why: str


Event = Accepted | Refused | Delta | End | Gap | Broken


class _Choice:
    """What a client has of one choice. Kept compact: thousands of streams are open at once."""

    __slots__ = ("end", "ids", "synced", "text")

    def __init__(self) -> None:
        self.ids = array("q")
        self.text = StringIO()
        self.end: ChoiceEnd | None = None
        self.synced = False
        """whether this epoch's owner has shown that it knows what was delivered"""

    def deliver(self, delta: Delta) -> Delta:
        self.ids.extend(delta.ids)
        self.text.write(delta.text)
        self.end = delta.end
        self.synced = True
        return delta


class Stream:
    """One request's frames in, at most one event an entry out."""

    __slots__ = ("_choices", "accepted", "attempt", "ended", "epoch")

    def __init__(self, n: int) -> None:
        self.attempt = 0
        self.epoch = -1
        self.accepted: Accepted | None = None
        self.ended = False
        self._choices = [_Choice() for _ in range(n)]

    def begin(self, attempt: int) -> None:
        """Frames of `attempt` count from now on. ValueError once anything was accepted: it can't move then (R6)."""
        if self.accepted is not None:
            raise ValueError("an accepted request doesn't move")
        self.attempt, self.epoch, self.ended = attempt, -1, False

    def apply(self, entry: Entry) -> Event | None:
        """Take one entry; what it means for the client, if anything."""
        if entry.attempt != self.attempt or self.ended or entry.epoch < self.epoch:
            return None
        if entry.epoch > self.epoch:
            self.epoch = entry.epoch
            for choice in self._choices:
                choice.synced = False
        if type(entry) is Delta:
            return self._delta(entry)
        if type(entry) is Accepted:
            return self._accept(entry)
        return self._end(entry) if isinstance(entry, End) else self._refuse(entry)

    def _accept(self, entry: Accepted) -> Event | None:
        if self.accepted is None:
            self.accepted = entry
            return entry
        if (entry.prompt_tokens, entry.fingerprint) != (self.accepted.prompt_tokens, self.accepted.fingerprint):
            return Broken("accepted again with another prompt length or numerics class")
        return None

    def _refuse(self, entry: Entry) -> Event | None:
        if not isinstance(entry, Refused):
            return None
        if self.accepted is not None:
            return Broken("refused after it was accepted")
        self.ended = True
        return entry

    def _delta(self, entry: Delta) -> Event | None:
        if self.accepted is None:
            return Gap()
        if not 0 <= entry.choice < len(self._choices):
            return Broken("a choice that was not asked for")
        choice = self._choices[entry.choice]
        have = len(choice.ids)
        if entry.first == have and choice.synced and choice.end is None:
            return choice.deliver(entry)
        if entry.first == 0:
            return _whole(choice, entry)
        if not choice.synced or entry.first + len(entry.ids) > have:
            return _beyond_end(choice, entry) or Gap()
        return None if choice.ids[entry.first : entry.first + len(entry.ids)] == array("q", entry.ids) else _DIFFERENT

    def _end(self, entry: End) -> Event | None:
        if self.accepted is None and (any(entry.tokens) or any(entry.ends)):
            return Gap()
        if len(entry.tokens) != len(self._choices) or len(entry.ends) != len(self._choices):
            return Broken("an ending of another number of choices")
        states = [_missing(*three) for three in zip(self._choices, entry.tokens, entry.ends, strict=True)]
        for state in states:
            if isinstance(state, Broken):
                return state
        if any(states):
            return Gap()
        self.ended = True
        return entry


_DIFFERENT = Broken("tokens or text that differ from what was delivered")


def _whole(choice: _Choice, entry: Delta) -> Event | None:
    """A Delta from position 0: the start of a choice, of an epoch, an answer to an Attach, or one of them again."""
    have, ids, text = len(choice.ids), array("q", entry.ids), choice.text.getvalue()
    shared = min(have, len(ids))
    if ids[:shared] != choice.ids[:shared]:
        return _DIFFERENT
    if len(ids) < have:  # older than what was delivered
        return None if text.startswith(entry.text) else _DIFFERENT
    if not entry.text.startswith(text):
        return None if text.startswith(entry.text) and len(ids) == have and entry.end is None else _DIFFERENT
    if choice.end is not None:
        choice.synced = True
        same = len(ids) == have and len(entry.text) == len(text) and entry.end in (None, choice.end)
        return None if same else _DIFFERENT
    logprobs = None if entry.logprobs is None else entry.logprobs[have:]
    rest = Delta(
        request_id=entry.request_id,
        attempt=entry.attempt,
        epoch=entry.epoch,
        choice=entry.choice,
        first=have,
        ids=entry.ids[have:],
        text=entry.text[len(text) :],
        logprobs=logprobs,
        end=entry.end,
        prompt=None if have else entry.prompt,
    )
    choice.deliver(rest)
    return rest if rest.ids or rest.text or rest.end else None


def _beyond_end(choice: _Choice, entry: Delta) -> Broken | None:
    """An owner that is in step but goes on after a choice's end contradicts itself."""
    if choice.synced and choice.end is not None and (entry.ids or entry.end not in (None, choice.end)):
        return Broken("tokens after the end of a choice")
    return None


def _missing(choice: _Choice, tokens: int, end: ChoiceEnd | None) -> Broken | bool:
    """Whether something of `choice` has not come yet, given what its ending says."""
    have = len(choice.ids)
    if tokens < have or (choice.end is not None and choice.end != end):
        return Broken("an ending that doesn't know what was delivered")
    return tokens > have or (end is not None and choice.end is None) or (have > 0 and not choice.synced)
