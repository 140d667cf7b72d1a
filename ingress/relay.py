"""Open requests: effects of their lives carried out, frames handed to them. The thin shell around `ingress.life`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from ingress.answer import Answer
from ingress.demand import Demand, ModelDemand
from ingress.dispatches import Broadcast
from ingress.endings import inconsistent, log_away, shutting_down
from ingress.errors import ApiError
from ingress.life import Effect, Failed, Life, Patience, Publish, SendAttach, SendCancel, Target
from ingress.metrics import Metrics
from ingress.pulse import Pulse
from ingress.router import Router, estimated_tokens
from ingress.sender import Parcel, Sender
from ingress.silence import LOOK_MS, Looks
from wire.clock import Clock
from wire.errors import BusError, Unavailable
from wire.messages import Accepted, Attach, Cancel, Delta, End, Entry, Frames, Refused, Request

log = logging.getLogger(__name__)


class Relay:
    """All open requests of this process, by id."""

    def __init__(
        self,
        *,
        patience: Patience,
        sender: Sender,
        router: Router,
        broadcast: Broadcast,
        demand: Demand,
        pulse: Pulse,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.patience = patience
        self.sender = sender
        self.router = router
        self.broadcast = broadcast
        self.demand = demand
        self.metrics = metrics
        self.clock = clock
        self._pulse = pulse
        self._runs: dict[str, Run] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting: dict[str, Run] = {}
        """of these, those that nobody has accepted yet"""
        self._any_waiting = asyncio.Event()
        self._looks = Looks()

    @property
    def open(self) -> int:
        """How many requests are open."""
        return len(self._runs)

    def log_is_away(self) -> bool:
        """Whether waiting for the log is pointless just now."""
        return self._pulse.log_is_away()

    def launch(self, request: Request, candidates: tuple[Target, ...], answer: Answer, index: int) -> Run:
        """Send a request; what comes of it goes to `answer` as its part `index`. ApiError 503 if it can't be sent."""
        asked = self.demand.of(request.model)
        asked.requests += 1
        asked.priorities[request.priority] += 1
        try:
            target = self._first(request, candidates)
        except ApiError:
            asked.refused += 1
            raise
        run = Run(self, request, candidates, answer, index)
        self._runs[request.request_id] = self._waiting[request.request_id] = run
        self._idle.clear()
        self._any_waiting.set()
        run.start(target)
        return run

    def _first(self, request: Request, candidates: tuple[Target, ...]) -> Target:
        """Where to send it. ApiError 503."""
        if self.log_is_away():
            raise log_away()
        target = self.router.first(request, candidates)
        if target is None:
            raise log_away()
        return target

    def frames(self, frames: Frames) -> None:
        """Hand a record's entries to their requests; all of a request's at once."""
        entries = frames.entries
        now_ms = self.clock.monotonic_ms()
        start = 0
        for end in range(1, len(entries) + 1):
            if end == len(entries) or entries[end].request_id != entries[start].request_id:
                run = self._runs.get(entries[start].request_id)
                if run is not None:
                    self._hand(run, now_ms, entries[start:end])
                start = end

    def _hand(self, run: Run, now_ms: float, entries: Sequence[Entry]) -> None:
        try:
            run.entries(now_ms, entries)
        except Exception:
            # One request's frames, however strange, must not end the reading of all others'.
            log.exception("frames of one request could not be taken")
            run.fail(inconsistent())

    async def watch(self) -> None:
        """While requests wait to be accepted, look again and again for engines that fell silent; until cancelled."""
        while True:
            await self._any_waiting.wait()
            await asyncio.sleep(LOOK_MS / 1_000)
            self._look()
            if not self._waiting:
                self._any_waiting.clear()

    def _look(self) -> None:
        """What a lost engine was sent and hasn't accepted may go elsewhere."""
        now_ms = self.clock.monotonic_ms()
        waiting = list(self._waiting.values())
        alike = {id(run.candidates): run for run in waiting}
        silent = (self.router.silent(run.model, run.candidates) for run in alike.values())
        lost = self._looks.look(now_ms, frozenset[Target]().union(*silent))
        for run in waiting if lost else ():
            if run.target in lost:
                self._leave(run, now_ms)

    def _leave(self, run: Run, now_ms: float) -> None:
        try:
            run.lost(now_ms)
        except Exception:
            # One request's choice, however wrong, must not end the watch for all others'.
            log.exception("a request could not leave a lost engine")
            run.fail(log_away())

    def accepted(self, request_id: str) -> None:
        """A request waits no more."""
        self._waiting.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """A request is over."""
        self._waiting.pop(request_id, None)
        self._runs.pop(request_id, None)
        if not self._runs:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no request is open."""
        await self._idle.wait()

    def fail_all(self) -> None:
        """This process ends: tell every client."""
        for run in list(self._runs.values()):
            run.fail(shutting_down())


class Run:
    """One open request: its life, its timer, and where its answer goes."""

    def __init__(
        self, relay: Relay, request: Request, candidates: tuple[Target, ...], answer: Answer, index: int
    ) -> None:
        self.candidates = candidates
        self._relay = relay
        self._request = request
        self._answer = answer
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._demand: ModelDemand = relay.demand.of(request.model)
        self._sent_ms = relay.clock.monotonic_ms()
        self._prompt_tokens = 0
        self._tokens = 0
        self._life = Life(
            request.body.n,
            relay.patience,
            self._sent_ms,
            lambda tried: relay.router.elsewhere(request, candidates, tried),
            relay.log_is_away,
        )

    @property
    def model(self) -> str:
        return self._request.model

    @property
    def target(self) -> Target:
        """Where the current attempt went."""
        return self._life.target

    @property
    def used_tokens(self) -> int:
        """Prompt tokens once accepted, and what was delivered."""
        return self._prompt_tokens + self._tokens

    def start(self, target: Target) -> None:
        """Send the first attempt."""
        self._demand.prompt_tokens += estimated_tokens(self._request)
        self._do(self._life.start(self._now(), target))

    def entries(self, now_ms: float, entries: Sequence[Entry]) -> None:
        """Take entries in order."""
        for entry in entries:
            if isinstance(entry, Refused | End):
                self._relay.router.told_of(self._request, entry)
        self._do(self._life.entries(now_ms, entries))

    def lost(self, now_ms: float) -> None:
        """The engine that it was sent to is taken for dead."""
        self._do(self._life.lost(now_ms))

    def client_gone(self) -> None:
        """Nobody reads any more."""
        self._do(self._life.client_gone())

    def give_up(self) -> None:
        """The client was told that the call failed."""
        self._do(self._life.give_up())

    def fail(self, error: ApiError) -> None:
        """Tell the client so, and give the request up."""
        if not self._life.done:
            self.give_up()
            self._answer.failed(error)

    def _now(self) -> float:
        return self._relay.clock.monotonic_ms()

    def _do(self, effects: Iterable[Effect]) -> None:
        rearm = False
        for effect in effects:
            if type(effect) is Delta:
                self._deliver(effect)
            else:
                self._carry_out(effect)
                rearm = True
        if rearm:
            self._arm()

    def _deliver(self, delta: Delta) -> None:
        count = len(delta.ids)
        if not self._tokens and count:
            seconds = (self._now() - self._sent_ms) / 1_000
            self._relay.metrics.first_token_seconds.labels(self._request.model).observe(seconds)
        self._tokens += count
        self._demand.tokens += count
        self._answer.delta(self._index, delta)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Publish():
                self._publish(effect)
            case SendCancel():
                self._cancel(effect)
            case SendAttach():
                self._attach(effect)
            case Accepted():
                self._accept(effect)
            case End():
                self._answer.ended(self._index, effect)
            case Failed():
                self._demand.failures += effect.error.status >= 500
                self._answer.failed(effect.error)

    def _publish(self, effect: Publish) -> None:
        request, relay = self._request, self._relay
        if effect.attempt > 1:
            request = msgspec.structs.replace(request, attempt=effect.attempt)
        relay.sender.put(Parcel(effect.target, request, self._hear_of(effect.attempt)))
        relay.broadcast.note(relay.router.sent(request, effect.attempt, effect.target))

    def _hear_of(self, attempt: int) -> Callable[[BusError | None], None]:
        def heard(error: BusError | None) -> None:
            if error is None:
                self._life.acked(attempt)
            elif isinstance(error, Unavailable):
                self._do(self._life.not_queued(attempt))
            else:
                self._do(self._life.send_unknown(self._now(), attempt))

        return heard

    def _cancel(self, effect: SendCancel) -> None:
        request, relay = self._request, self._relay
        relay.metrics.cancels.labels(effect.reason).inc()
        relay.router.ended(request, effect.attempt, "timed_out" if effect.reason == "moved" else None)
        cancel = Cancel(
            request_id=request.request_id,
            attempt=effect.attempt,
            reason=effect.reason,
            accept_by_ms=request.accept_by_ms,
        )
        relay.sender.put(Parcel(effect.target, cancel))

    def _attach(self, effect: SendAttach) -> None:
        self._relay.metrics.attaches.inc()
        attach = Attach(request_id=self._request.request_id, attempt=effect.attempt, reply=self._request.reply)
        self._relay.sender.put(Parcel(effect.target, attach))

    def _accept(self, accepted: Accepted) -> None:
        self._relay.accepted(self._request.request_id)
        waited_ms = max(self._now() - self._sent_ms, 0.0)
        self._prompt_tokens = accepted.prompt_tokens
        self._demand.accept.add(waited_ms)
        self._relay.metrics.accept_seconds.labels(self._request.model).observe(waited_ms / 1_000)
        self._answer.accepted(self._index, accepted)

    def _arm(self) -> None:
        """Have the timer ring when the life next wants to be asked. It is moved only to ring earlier."""
        if self._life.done:
            self._close()
            return
        delay_s = max(self._life.due_ms() - self._now(), 0.0) / 1_000
        if self._timer is not None:
            if self._timer.when() <= self._loop.time() + delay_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._do(self._life.tick(self._now()))
        if not self._life.done:
            self._arm()

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        relay, request = self._relay, self._request
        for attempt in range(1, relay.patience.attempts + 1):
            relay.router.ended(request, attempt)
        relay.metrics.tokens.labels(request.model).inc(self._tokens)
        relay.forget(request.request_id)
