"""A request's life from its first attempt to its one ending: entries and time in, effects out. Pure.

1. Publish an attempt, wait for its Accepted.
2. None in time, its engine lost, or refused with hope elsewhere: the next attempt first, then Cancel the old (R6).
3. Out of time: the client is told, and not earlier, since the log may come back until then (R1); Cancel(gave_up) too.
4. Accepted: frames become deliveries (`ingress.stream`). A gap, or silence that grows, asks the owner again (R7).
5. The End, a client that left, a deadline or a contradiction ends it. Every ending but the End sends a Cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ingress.endings import deadline_passed, error_of_end, error_of_refusal, inconsistent, log_away, nobody_accepted
from ingress.errors import ApiError
from ingress.stream import Broken, Event, Gap, Stream
from routing.board import Candidate
from wire.messages import Accepted, CancelReason, Delta, End, Entry, Refused

Target = Candidate
"""A shard that an attempt goes to"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a request waits for what, in milliseconds."""

    accept_ms: int
    """for an Accepted, over all attempts"""
    attempt_ms: int
    """for one attempt's, while there is another shard to try"""
    request_ms: int
    """for the End"""
    silence_ms: int = 5_000
    """before the owner is asked again; doubles each time up to `max_silence_ms`"""
    max_silence_ms: int = 40_000
    gap_ms: int = 1_000
    """between two Attaches for a gap"""
    grace_ms: int = 5_000
    """after the deadline, for the owner's own ending to arrive"""
    attempts: int = 4
    """at most, refused ones included"""


@dataclass(frozen=True, slots=True)
class Publish:
    """Send the Request as this attempt."""

    attempt: int
    target: Target


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Send a Cancel of this attempt."""

    attempt: int
    target: Target
    reason: CancelReason


@dataclass(frozen=True, slots=True)
class SendAttach:
    """Ask the owner of this attempt to send everything again."""

    attempt: int
    target: Target


@dataclass(frozen=True, slots=True)
class Failed:
    """The client is told this; nothing follows."""

    error: ApiError


Effect = Publish | SendCancel | SendAttach | Accepted | Delta | End | Failed
Elsewhere = Callable[[frozenset[Target]], Target | None]
"""Another shard than those tried, within the retry budget; None if there is none"""


class Life:
    """One request. `now_ms` is monotonic throughout; `elsewhere` and `log_is_away` answer at once."""

    __slots__ = (
        "_asked_ms",
        "_elsewhere",
        "_gap_ms",
        "_heard_ms",
        "_log_is_away",
        "_lost",
        "_patience",
        "_sent_ms",
        "_silence_ms",
        "_started_ms",
        "_stream",
        "_targets",
        "_unacked",
        "done",
    )

    def __init__(
        self,
        n: int,
        patience: Patience,
        now_ms: float,
        elsewhere: Elsewhere,
        log_is_away: Callable[[], bool],
    ) -> None:
        self.done = False
        self._patience = patience
        self._elsewhere = elsewhere
        self._log_is_away = log_is_away
        self._stream = Stream(n)
        self._targets: list[Target] = []
        self._started_ms = self._sent_ms = self._heard_ms = now_ms
        self._asked_ms = now_ms
        self._gap_ms = now_ms - patience.gap_ms
        self._silence_ms = patience.silence_ms
        self._unacked = True
        self._lost = False

    @property
    def accepted(self) -> bool:
        return self._stream.accepted is not None

    @property
    def target(self) -> Target:
        """Where the current attempt went."""
        return self._targets[-1]

    def start(self, now_ms: float, target: Target) -> list[Effect]:
        """The first attempt."""
        return [self._next(now_ms, target)]

    def acked(self, attempt: int) -> None:
        """The log has this attempt's Request."""
        if attempt == len(self._targets):
            self._unacked = False

    def not_queued(self, attempt: int) -> list[Effect]:
        """This attempt's Request could not be queued, so there is nothing to cancel."""
        return [] if self._is_over(attempt) else self._close(Failed(log_away()))

    def send_unknown(self, now_ms: float, attempt: int) -> list[Effect]:
        """This attempt's Request may be in the log or not, now or later."""
        return [] if self._is_over(attempt) else self._move(now_ms) or self._fail(log_away())

    def lost(self, now_ms: float) -> list[Effect]:
        """The current attempt's engine is taken for dead: as if its time were up now, but once an attempt.

        With nowhere to go it waits for the rest of its time. What was accepted stays: the shard's next owner goes on
        with it (R6).
        """
        if self.done or self.accepted or self._lost or self._log_is_away():
            return []
        self._lost = True
        return self._move(now_ms)

    def entries(self, now_ms: float, entries: Sequence[Entry]) -> list[Effect]:
        """Frames' entries of this request, in order."""
        effects: list[Effect] = []
        for entry in entries:
            if self.done:
                break
            event = self._stream.apply(entry)
            if type(event) is Delta:
                self._heard_ms, self._silence_ms = now_ms, self._patience.silence_ms
                effects.append(event)
            elif event is not None:
                effects += self._event(now_ms, event)
        return effects

    def tick(self, now_ms: float) -> list[Effect]:
        """What is due by now."""
        if self.done:
            return []
        return self._tick_running(now_ms) if self.accepted else self._tick_waiting(now_ms)

    def due_ms(self) -> float:
        """When `tick` has to be called next, on the same clock."""
        patience = self._patience
        if self.accepted:
            return min(
                self._started_ms + patience.request_ms + patience.grace_ms,
                max(self._heard_ms, self._asked_ms) + self._silence_ms,
            )
        return min(self._started_ms + patience.accept_ms, self._sent_ms + patience.attempt_ms)

    def client_gone(self) -> list[Effect]:
        """Nobody reads any more; billed for what was generated."""
        return self._end("client_gone")

    def give_up(self) -> list[Effect]:
        """The client was told that it failed; not billed."""
        return self._end("gave_up")

    def _is_over(self, attempt: int) -> bool:
        return self.done or self.accepted or attempt != len(self._targets)

    def _next(self, now_ms: float, target: Target) -> Publish:
        self._targets.append(target)
        self._stream.begin(len(self._targets))
        self._sent_ms = self._asked_ms = now_ms
        self._unacked = True
        self._lost = False
        return Publish(len(self._targets), target)

    def _move(self, now_ms: float, *, cancel: bool = True) -> list[Effect]:
        if len(self._targets) >= self._patience.attempts:
            return []
        target = self._elsewhere(frozenset(self._targets))
        if target is None:
            return []
        old = SendCancel(len(self._targets), self.target, "moved")
        new = self._next(now_ms, target)
        return [new, old] if cancel else [new]

    def _event(self, now_ms: float, event: Event) -> list[Effect]:
        match event:
            case Accepted():
                self._heard_ms = now_ms
                return [event]
            case Refused():
                return (self._move(now_ms, cancel=False) if event.elsewhere else []) or self._close(
                    Failed(error_of_refusal(event))
                )
            case End():
                return self._close(event if (error := error_of_end(event)) is None else Failed(error))
            case Gap():
                return self._ask_for_gap(now_ms)
            case Broken():
                return self._fail(inconsistent())
        return []

    def _tick_waiting(self, now_ms: float) -> list[Effect]:
        patience = self._patience
        # Not before: until then the log may still come back and the Request be run, whatever a client was told (R1).
        if now_ms >= self._started_ms + patience.accept_ms:
            return self._fail(log_away() if self._unacked and self._log_is_away() else nobody_accepted())
        if now_ms >= self._sent_ms + patience.attempt_ms:
            self._sent_ms = now_ms  # ask again after as long, if there is nowhere to go now
            return [] if self._log_is_away() else self._move(now_ms)
        return []

    def _tick_running(self, now_ms: float) -> list[Effect]:
        patience = self._patience
        if now_ms >= self._started_ms + patience.request_ms + patience.grace_ms:
            return self._fail(deadline_passed(), "client_gone")
        if now_ms >= max(self._heard_ms, self._asked_ms) + self._silence_ms:
            self._silence_ms = min(self._silence_ms * 2, patience.max_silence_ms)
            return self._ask(now_ms)
        return []

    def _ask_for_gap(self, now_ms: float) -> list[Effect]:
        # Every frame past a gap shows the gap again; silence is what asks when no frame comes any more.
        if now_ms - self._gap_ms < self._patience.gap_ms:
            return []
        self._gap_ms = now_ms
        return self._ask(now_ms)

    def _ask(self, now_ms: float) -> list[Effect]:
        self._asked_ms = now_ms
        return [SendAttach(len(self._targets), self.target)]

    def _end(self, reason: CancelReason) -> list[Effect]:
        if self.done:
            return []
        return self._close(SendCancel(len(self._targets), self.target, reason))

    def _fail(self, error: ApiError, reason: CancelReason = "gave_up") -> list[Effect]:
        return [*self._end(reason), Failed(error)]

    def _close(self, effect: Effect) -> list[Effect]:
        self.done = True
        return [effect]
