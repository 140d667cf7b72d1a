"""A world for the shard's state machine: a log, workers that die or freeze, and readers; every step chosen by a seed.

Tokens are drawn at random at each step, so two owners never agree by luck: safety must not rest on R8.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from wire.bus import Commit
from wire.fleet import Fleet
from wire.journal import Attempt, Fold, usage_of
from wire.messages import (
    Attach,
    Begin,
    Body,
    Cancel,
    Carry,
    Delta,
    End,
    Frames,
    Journal,
    Lane,
    Logprob,
    Ref,
    Refusal,
    Refused,
    ReplyTo,
    Request,
    Sampling,
    TokenLogprob,
    Usage,
)
from workers.effects import (
    Append,
    Effect,
    Halt,
    HaltAll,
    Identity,
    Prepared,
    ReadTail,
    Reclaim,
    Reply,
    Run,
    SendUsage,
    Term,
)
from workers.engine.protocol import Emission, Key
from workers.shard import REMEMBER_MS, Shard
from workers.watermark import Hint

FLEET = Fleet("local", "cpu", "m", "1", "sim")
READER = ReplyTo(region="local", slot=0, incarnation="a")
START_MS = 1_700_000_000_000


class Letters:
    """Token i is the letter with that number."""

    def render_text(self, ids: Sequence[int], stop: Sequence[str], end: str | None, *, calls: bool = False) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def show_logprobs(self, ids: Sequence[int], logprobs: Sequence[Logprob]) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(token=str(i), bytes=(i,), logprob=p.logprob) for i, p in zip(ids, logprobs, strict=True)
        )


def make_request(number: int, now_ms: int, *, n: int = 1, max_tokens: int = 3, accept_ms: int = 20_000) -> Request:
    return Request(
        request_id=f"r{number}",
        attempt=1,
        tenant="t",
        project="p",
        key_id="k",
        model="m",
        version="1",
        body=Body(
            sampling=Sampling(seed=number), messages=({"role": "user", "content": "x"},), n=n, max_tokens=max_tokens
        ),
        reply=READER,
        created_ms=now_ms,
        accept_by_ms=now_ms + accept_ms,
        deadline_ms=now_ms + 10_000_000,
    )


@dataclass
class Client:
    """What a reader of an attempt may believe, by the rules of R7."""

    epoch: int = -1
    fresh: set[int] = field(default_factory=set)
    """choices that had their first Delta of this epoch"""
    ids: dict[int, list[int]] = field(default_factory=dict)
    end: End | Refused | None = None
    accepted: bool = False

    def take(self, entry: object) -> None:
        epoch = entry.epoch  # type: ignore[attr-defined]
        if self.end is not None or epoch < self.epoch:
            return
        if epoch > self.epoch:
            self.epoch, self.fresh = epoch, set()
        match entry:
            case Delta():
                self._delta(entry)
            case End() | Refused():
                self._end(entry)
            case _:
                self.accepted = True

    def _delta(self, delta: Delta) -> None:
        have = self.ids.setdefault(delta.choice, [])
        if delta.first == 0:
            n = min(len(have), len(delta.ids))
            assert list(delta.ids[:n]) == have[:n], "a reader saw tokens that a later frame contradicts"
            have.extend(delta.ids[n:])
            self.fresh.add(delta.choice)
        elif delta.first == len(have) and delta.choice in self.fresh:
            have.extend(delta.ids)

    def _end(self, entry: End | Refused) -> None:
        if isinstance(entry, Refused) or all(len(self.ids.get(i, [])) == count for i, count in enumerate(entry.tokens)):
            self.end = entry


class EngineRun:
    """A request in an engine: it knows how far each choice is, whatever the shard has taken in of that."""

    def __init__(self, attempt: Attempt) -> None:
        self.limit = attempt.begin.request.body.max_tokens or 1
        self.positions = [len(choice.ids) for choice in attempt.choices]
        self.ended = [choice.end is not None for choice in attempt.choices]


class Worker:
    """A process: a shard machine, its sends on their way, its engine."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.shard = Shard(Identity(engine=name, incarnation=name, fleet=FLEET, shard=0), Letters())
        self.sends: deque[Append] = deque()
        self.usages: deque[SendUsage] = deque()
        self.engine: dict[Key, EngineRun] = {}
        self.pipe: deque[list[Emission]] = deque()
        self.position = 0
        self.tail: ReadTail | None = None
        self.assigned = False

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Append():
                    self.sends.append(effect)
                    self.shard.written(100)
                case Reply():
                    self.world.replies.append(effect.frames)
                case SendUsage():
                    self.usages.append(effect)
                case Run():
                    self.engine[Key(0, effect.epoch, effect.attempt.ref)] = EngineRun(effect.attempt)
                case Halt():
                    self.engine.pop(Key(0, effect.epoch, effect.ref), None)
                case HaltAll():
                    self.engine = {k: a for k, a in self.engine.items() if k.epoch != effect.epoch}
                case ReadTail():
                    self.tail = effect
                case Reclaim():
                    if self.assigned and self.world.proposed is self:
                        self.claim()

    def claim(self) -> None:
        self.do(self.shard.claim(f"{self.name}{self.world.now_ms}", "fp", self.world.now_ms))


class World:
    """Everything outside the workers, and what may happen next."""

    def __init__(self, choose: random.Random) -> None:
        self.choose = choose
        self.now_ms = START_MS
        self.journal: list[Journal] = []
        self.lane: list[Request | Cancel | Attach | None] = []
        self.commit: Commit | None = None
        self.usage: list[Usage] = []
        self.replies: deque[Frames] = deque()
        self.ghosts: list[deque[Journal]] = []
        self.clients: dict[tuple[str, int], Client] = {}
        self.numbers = 0
        self.workers: list[Worker] = []
        self.proposed: Worker | None = None
        self.trace: list[str] = []

    # ---------------------------------------------------------------- what can happen

    def step(self) -> None:
        options = [
            (4, self.client_sends),
            (1, self.client_cancels),
            (1, self.client_attaches),
            (12, self.send_lands),
            (12, self.record_is_read),
            (10, self.engine_steps),
            (10, self.step_arrives),
            (8, self.reply_arrives),
            (4, self.usage_arrives),
            (3, self.commit_is_made),
            (2, self.tail_is_read),
            (2, self.time_passes),
            (1, self.reply_is_lost),
            (1, self.send_lands_unseen),
            (1, self.send_is_given_up),
            (1, self.ghost_lands),
            (1, self.worker_dies),
            (1, self.group_moves),
            (1, self.engine_dies),
            (1, self.cancel_comes_early),
        ]
        weights, actions = zip(*options, strict=True)
        action = self.choose.choices(actions, weights)[0]
        self.trace.append(action.__name__)
        action()

    def any_worker(self) -> Worker | None:
        return self.choose.choice(self.workers) if self.workers else None

    def client_sends(self) -> None:
        if len(self.clients) > 12:
            return
        self.numbers += 1
        n, length = self.choose.choice([1, 1, 2]), self.choose.randint(1, 5)
        late = -1 if self.choose.random() < 0.1 else 20_000
        request = make_request(self.numbers, self.now_ms, n=n, max_tokens=length, accept_ms=late)
        self.lane.append(request)
        self.clients[request.request_id, 1] = Client()

    def client_cancels(self) -> None:
        if names := list(self.clients):
            name, attempt = self.choose.choice(names)
            reason = self.choose.choice(["client_gone", "gave_up", "moved"])
            self.lane.append(Cancel(request_id=name, attempt=attempt, reason=reason, accept_by_ms=self.now_ms + 20_000))

    def cancel_comes_early(self) -> None:
        if len(self.clients) > 12:
            return
        self.numbers += 1
        request = make_request(self.numbers, self.now_ms)
        self.lane.append(
            Cancel(request_id=request.request_id, attempt=1, reason="client_gone", accept_by_ms=request.accept_by_ms)
        )
        if self.choose.random() < 0.7:
            self.lane.append(request)
            self.clients[request.request_id, 1] = Client()

    def client_attaches(self) -> None:
        if names := list(self.clients):
            name, attempt = self.choose.choice(names)
            self.lane.append(Attach(request_id=name, attempt=attempt, reply=READER))

    def send_lands(self) -> None:
        if (worker := self.any_worker()) and worker.sends:
            append = worker.sends.popleft()
            self.journal.append(append.record)
            worker.do(worker.shard.appended(append.term, len(self.journal) - 1))

    def send_lands_unseen(self) -> None:
        """The record is in the log, but the sender never hears so; all it queued behind it fails too."""
        if (worker := self.any_worker()) and worker.sends:
            self.journal.append(worker.sends[0].record)
            self.fail(worker, worker.sends[0].term)

    def send_is_given_up(self) -> None:
        """The sender gave up, and the records may land later all the same."""
        if (worker := self.any_worker()) and worker.sends:
            self.ghosts.append(deque(append.record for append in worker.sends))
            self.fail(worker, worker.sends[0].term)

    def fail(self, worker: Worker, term: Term) -> None:
        worker.sends.clear()
        worker.do(worker.shard.append_failed(term))

    def ghost_lands(self) -> None:
        if ghosts := [g for g in self.ghosts if g]:
            self.journal.append(self.choose.choice(ghosts).popleft())

    def record_is_read(self) -> None:
        worker = self.any_worker()
        if worker is None or worker.shard.phase != "owning" or worker.position >= len(self.lane):
            return
        offset, record = worker.position, self.lane[worker.position]
        worker.position += 1
        shard = worker.shard
        match record:
            case Request():
                refused = record.body.sampling.seed % 7 == 0
                prepared = (
                    Refusal(status=400, code="x", message="no") if refused else Prepared(prompt=(1, 2), max_tokens=9)
                )
                worker.do(shard.request("requests", offset, record, prepared, self.now_ms))
            case Cancel():
                worker.do(shard.cancel("requests", offset, record, self.now_ms))
            case Attach():
                worker.do(shard.attach("requests", offset, record))
            case None:
                shard.skip("requests", offset)

    def engine_steps(self) -> None:
        if worker := self.any_worker():
            worker.pipe.append([e for key, run in worker.engine.items() for e in self.emit(key, run)])

    def step_arrives(self) -> None:
        if (worker := self.any_worker()) and worker.pipe:
            worker.do(worker.shard.stepped(worker.pipe.popleft(), self.now_ms))

    def emit(self, key: Key, run: EngineRun) -> list[Emission]:
        out = []
        for index, position in enumerate(run.positions):
            if run.ended[index] or self.choose.random() < 0.3:
                continue
            ids = (self.choose.randrange(26),)
            run.positions[index] += 1
            run.ended[index] = run.positions[index] >= run.limit
            end = "length" if run.ended[index] else None
            cached = self.choose.choice((None, 1, 2))  # at any time: only the first record may count
            out.append(Emission(key, index, position, ids, chr(97 + ids[0]), end=end, cached_tokens=cached))
        return out

    def engine_dies(self) -> None:
        worker = self.any_worker()
        if worker is not None and worker.engine:
            running = frozenset(key.ref for key in worker.engine)
            worker.engine.clear()
            worker.pipe.clear()  # what the host had not read of the dead process is gone with it
            worker.do(worker.shard.engine_died(running, self.now_ms))

    def reply_arrives(self) -> None:
        if self.replies:
            for entry in self.replies.popleft().entries:
                if (client := self.clients.get((entry.request_id, entry.attempt))) is not None:
                    client.take(entry)
                    self.check_reader((entry.request_id, entry.attempt), client)

    def reply_is_lost(self) -> None:
        if self.replies:
            self.replies.popleft()

    def usage_arrives(self) -> None:
        if (worker := self.any_worker()) and worker.usages:
            effect = worker.usages.popleft()
            self.usage.append(effect.usage)
            worker.shard.usage_sent(effect.term, effect.ref)

    def commit_is_made(self) -> None:
        worker = self.any_worker()
        if worker is None or worker is not self.proposed:
            return  # the group takes commits of its own members only
        commits = worker.shard.commits()
        if commits is not None:
            self.commit = commits["requests"]

    def tail_is_read(self) -> None:
        worker = self.any_worker()
        if worker is None or worker.tail is None:
            return
        effect, worker.tail = worker.tail, None
        start, fold = 0, Fold()
        if self.commit is not None:
            hint = Hint.parse(self.commit.metadata)
            start, fold = hint.offset, Fold(hint.epoch)
        for offset in range(start, effect.until + 1):
            fold.apply(offset, self.journal[offset])
        sizes: dict[Ref, int] = {}
        starts: dict[Lane, int] = {"requests": self.commit.offset if self.commit else 0, "batch": 0}
        worker.position = starts["requests"]
        worker.do(worker.shard.tail_read(effect.term, fold, sizes, starts, self.now_ms))

    def time_passes(self) -> None:
        self.now_ms += self.choose.choice([100, 5_000, 30_000, 400_000])
        for worker in self.workers:
            worker.do(worker.shard.tick(self.now_ms))

    def worker_dies(self) -> None:
        if (worker := self.any_worker()) is not None:
            self.kill(worker)

    def kill(self, worker: Worker) -> None:
        on_their_way = [append.record for append in worker.sends]
        self.ghosts.append(deque(on_their_way[: self.choose.randint(0, len(on_their_way))]))
        self.workers.remove(worker)
        if self.proposed is worker:
            self.proposed = None

    def group_moves(self) -> None:
        """The group proposes somebody (new); whoever had the shard goes on until it finds out."""
        if len(self.workers) < 3 and self.choose.random() < 0.6:
            self.workers.append(Worker(self, f"w{len(self.trace)}"))
        if self.workers:
            self.proposed = self.choose.choice(self.workers)
            self.proposed.assigned = True
            if self.proposed.shard.phase == "idle":
                self.proposed.claim()

    # ---------------------------------------------------------------- what must always hold

    def whole(self) -> dict[tuple[str, int], Attempt]:
        fold = Fold()
        for offset, record in enumerate(self.journal):
            fold.apply(offset, record)
        return {(a.begin.request.request_id, a.begin.request.attempt): a for a in fold.attempts.values()}

    def check_reader(self, name: tuple[str, int], client: Client) -> None:
        """R2: no reader holds a token that the journal lacks."""
        attempt = self.whole().get(name)
        for index, ids in client.ids.items():
            held = attempt.choices[index].ids if attempt else []
            assert held[: len(ids)] == ids, f"{name} was given {ids}, the journal has {held}"
        if client.end is None:
            return
        assert attempt is not None
        assert attempt.finish is not None
        if isinstance(client.end, End):
            assert attempt.finish.reason == client.end.reason
        elif client.end.code == "request_not_found":
            assert self.now_ms - attempt.finish.at_ms > REMEMBER_MS, "forgotten too early"

    def settle(self) -> None:
        """Nothing fails any more: one worker takes over and runs everything to its end."""
        for ghost in self.ghosts:
            self.journal.extend(ghost)
        self.ghosts.clear()
        for worker in list(self.workers):
            self.kill(worker)
        self.ghosts.clear()
        while self.replies:
            self.reply_arrives()
        self.lane += [Attach(request_id=name, attempt=n, reply=READER) for name, n in self.clients]
        last = Worker(self, "last")
        self.workers, self.proposed, last.assigned = [last], last, True
        last.claim()
        for _ in range(3000):
            self.send_lands(), self.tail_is_read(), self.record_is_read()
            self.engine_steps(), self.step_arrives()
            self.usage_arrives(), self.reply_arrives(), self.commit_is_made()
            if last.shard.phase == "owning" and last.position == len(self.lane) and last.shard.settled:
                break
        while self.replies:
            self.reply_arrives()
        self.now_ms += 21_000
        last.do(last.shard.tick(self.now_ms))
        self.commit_is_made()

    def check_settled(self) -> None:
        """R4: one ending each. R6: every Usage the same, whoever sent it. R5: nothing is left to read."""
        attempts = self.whole()
        begun = [r.request.request_id for r in self.journal if isinstance(r, Begin)]
        carried = [r for r in self.journal if isinstance(r, Carry)]
        assert set(attempts) == set(self.clients), "every request that was sent is in the journal"
        assert begun or not self.clients or carried
        for name, attempt in attempts.items():
            assert attempt.finish is not None, f"{name} has no ending"
            sent = [u for u in self.usage if (u.request_id, u.attempt) == name]
            assert sent, f"{name} has no usage"
            assert set(map(repr, sent)) == {repr(usage_of(FLEET, 0, attempt))}
            client = self.clients[name]
            assert client.end is not None, f"{name}'s reader waits for ever"
            if isinstance(client.end, End):
                held = {i: ids for i, ids in client.ids.items() if ids}
                assert held == {i: c.ids for i, c in enumerate(attempt.choices) if c.ids}
        assert self.commit is not None
        assert self.commit.offset == len(self.lane)
