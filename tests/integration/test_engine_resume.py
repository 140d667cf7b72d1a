"""Killed after any step, and rebuilt from its journal, an engine gives the client the same bytes as if it had lived on.

The journal and the client are the real ones: each step's spans go through the codec into the fold that a takeover
reads, and what leaves for the client comes together by the ingress's own rules (R7).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from engine_world import LIMITS as TINY_LIMITS
from engine_world import make_sequence, write_model

from ingress.stream import Broken, Gap, Stream
from millstream.model import prepare
from millstream.paths import cache_dir
from wire.codec import decode, encode
from wire.fleet import Fleet
from wire.journal import Attempt, Fold
from wire.messages import (
    Begin,
    Body,
    Claim,
    Delta,
    Journal,
    Message,
    ReplyTo,
    Request,
    TokenLogprob,
    Tokens,
)
from workers.effects import Identity
from workers.engine.protocol import Restored, Sequence
from workers.engine.runner import Runner, load_runner
from workers.engine.scheduler import Limits
from workers.engine.tokenizer import Tokenizer
from workers.engine.torch_engine import TorchEngine
from workers.entries import View, span_of

LIMITS = Limits(slots=16, context_tokens=256, kv_tokens=16 * 256, chunk_tokens=64, step_tokens=1024)
STEPS = 1_000
EPOCH = 1
"""of every sequence's key: what the test's engines are told"""


@dataclass
class Seen:
    """What a client has of one choice."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: tuple[TokenLogprob, ...] | None = None
    end: str | None = None


class World:
    """A journal, the clients of all requests, and engines that come and go."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, limits: Limits, sequences: list[Sequence]) -> None:
        self._runner, self._tokenizer, self._limits = runner, tokenizer, limits
        self._sequences = sequences
        self._fold = Fold()
        self._offset = 0
        self._streams = {sequence.key.ref: Stream(sequence.n) for sequence in sequences}
        self.seen: defaultdict[tuple[int, int], Seen] = defaultdict(Seen)
        self._view = self._claimed()
        for stream in self._streams.values():
            stream.begin(1)
        for sequence in sequences:
            self._journal(_begun(sequence, self._view.epoch))
        self._engine = self._fresh_engine()

    def live(self, steps: int = STEPS) -> bool:
        """So many steps at most; whether anything is left to do."""
        for _ in range(steps):
            if not self._engine.busy():
                break
            self._step()
        return self._engine.busy()

    def live_until_it_speaks(self) -> bool:
        """Up to the next token of any request; whether anything is left to do."""
        while self._engine.busy() and not self._step():
            pass
        return self._engine.busy()

    def _step(self) -> bool:
        emissions = self._engine.step()
        assert not any(emission.error for emission in emissions)
        spans = tuple(map(span_of, emissions))
        self._journal(Tokens(epoch=self._view.epoch, spans=spans, at_ms=1))
        for emission in emissions:
            attempt = self._fold.attempts[emission.key.ref]
            self._tell(attempt, self._view.delta(attempt, emission))
        return bool(emissions)

    def die(self) -> None:
        """The next owner claims, tells every client everything, and goes on with a new engine."""
        self._view = self._claimed()
        self._engine = self._fresh_engine()

    def _fresh_engine(self) -> TorchEngine:
        """Nothing of the former one's cache is left."""
        self._runner._kv.fill_(torch.nan)
        engine = TorchEngine(self._runner, self._tokenizer, self._limits)
        for sequence in self._sequences:
            attempt = self._fold.attempts[sequence.key.ref]
            for entry in self._view.all(attempt):
                self._tell(attempt, entry)
            if not attempt.ended:
                engine.add(_restored(sequence, attempt))
        return engine

    def _claimed(self) -> View:
        claim = Claim(engine="e", incarnation="i", nonce="n", fingerprint=self._runner.fingerprint, at_ms=1)
        self._journal(claim)
        identity = Identity(engine="e", incarnation="i", fleet=Fleet("r", "cpu", "m", "1", "n"), shard=0)
        assert self._fold.epoch is not None
        return View(identity=identity, shown=self._tokenizer, fingerprint=claim.fingerprint, epoch=self._fold.epoch)

    def _journal(self, record: Journal) -> None:
        written: Message = decode(encode(record))
        self._fold.apply(self._offset, written)  # type: ignore[arg-type]
        self._offset += 1

    def _tell(self, attempt: Attempt, entry: object) -> None:
        event = self._streams[attempt.ref].apply(entry)  # type: ignore[arg-type]
        assert not isinstance(event, Gap | Broken), event
        if isinstance(event, Delta):
            seen = self.seen[attempt.ref, event.choice]
            seen.ids += event.ids
            seen.text += event.text
            seen.logprobs += event.logprobs or ()
            seen.prompt = seen.prompt or event.prompt
            seen.end = event.end


def _begun(sequence: Sequence, epoch: int) -> Begin:
    body = Body(
        sampling=sequence.sampling,
        prompt=sequence.prompt,
        stop=sequence.stop,
        n=sequence.n,
        logprobs=sequence.logprobs,
        prompt_logprobs=sequence.prompt_logprobs,
    )
    request = Request(
        request_id=f"request-{sequence.key.ref}",
        attempt=1,
        tenant="t",
        project="p",
        key_id="k",
        model="m",
        version="1",
        body=body,
        reply=ReplyTo(region="r", slot=0, incarnation="i"),
        created_ms=1,
        accept_by_ms=2,
        deadline_ms=3,
    )
    prompt_tokens = len(sequence.prompt)
    return Begin(
        epoch=epoch, ref=sequence.key.ref, request=request, prompt_tokens=prompt_tokens, cached_tokens=0, at_ms=1
    )


def _restored(sequence: Sequence, attempt: Attempt) -> Sequence:
    """As the owner gives it to an engine again."""
    if not any(choice.ids or choice.end for choice in attempt.choices):
        return sequence
    restored = tuple(Restored(tuple(choice.ids), choice.end) for choice in attempt.choices)
    fields = {name: getattr(sequence, name) for name in sequence.__struct_fields__}
    return Sequence(**{**fields, "restored": restored})


def answered(runner: Runner, tokenizer: Tokenizer, limits: Limits, sequences: list[Sequence]) -> dict[object, Seen]:
    """What an engine says that lives to the end."""
    world = World(runner, tokenizer, limits, sequences)
    assert not world.live()
    return dict(world.seen)


# ---------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare(cache_dir(), print)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> Runner:
    return load_runner(model_dir, slots=LIMITS.slots, context_tokens=LIMITS.context_tokens, threads=2)


def requests_of(tokenizer: Tokenizer, stops: tuple[tuple[str, ...], ...] = ((), ())) -> list[Sequence]:
    """One of each kind. `stops`: of the two that have any, once it is known what they say."""

    def asked(ref: int, question: str, **changes: object) -> Sequence:
        return make_sequence(ref, tokenizer.encode_text(question), **{"max_tokens": 11, **changes})  # type: ignore[arg-type]

    emoji, korean = tokenizer.encode_plain("🌾🎉"), tokenizer.encode_plain("안녕하세요")
    return [
        asked(0, "A mill is", temperature=0.0),
        asked(1, "Three rivers are", seed=7, temperature=0.9, top_p=0.95),
        asked(2, "1, 2, 3, 4,", temperature=0.0, stop=stops[0]),
        asked(3, "1, 2, 3, 4,", temperature=0.0, stop=stops[1]),
        asked(4, "Emoji:", seed=5, logit_bias={str(token): 60.0 for token in emoji}, frequency_penalty=2.0),
        asked(5, "한국어:", seed=6, logit_bias={str(token): 60.0 for token in korean}, presence_penalty=1.0),
        asked(6, "The sky is", seed=8, logprobs=3, top_k=40),
        asked(7, "A word:", seed=9, n=2, temperature=1.3, logprobs=0),
        asked(8, "Again and again and", seed=10, repetition_penalty=1.3, frequency_penalty=0.5, min_p=0.02),
        asked(9, "Hi", seed=11, min_tokens=8, logit_bias={"2": 30.0}),
        make_sequence(10, tokenizer.encode_text("The sun"), 5, prompt_logprobs=2, logprobs=2, temperature=0.0, n=2),
        make_sequence(11, tokenizer.encode_text("ab ab ab ab ab ab ab"), 11, temperature=0.0, logprobs=1),
    ]


@pytest.mark.model
@pytest.mark.timeout(900)
def test_killed_after_every_token_the_real_model_says_the_same(runner: Runner, tokenizer: Tokenizer) -> None:
    free = answered(runner, tokenizer, LIMITS, requests_of(tokenizer))
    counting = free[2, 0].text
    sequences = requests_of(tokenizer, stops=((counting[6:12],), (counting[4:8] + "never",)))
    whole = answered(runner, tokenizer, LIMITS, sequences)
    _each_case_is_what_it_is_called(free, whole, tokenizer)
    world, deaths = World(runner, tokenizer, LIMITS, sequences), 0
    while world.live_until_it_speaks():
        world.die()
        deaths += 1
    assert deaths >= 10
    assert dict(world.seen) == whole


def _each_case_is_what_it_is_called(free: dict, whole: dict, tokenizer: Tokenizer) -> None:  # type: ignore[type-arg]
    assert (whole[2, 0].end, whole[2, 0].text) == ("stop", free[2, 0].text[:6])
    assert len(whole[2, 0].ids) > 1
    assert (whole[3, 0].end, whole[3, 0].text) == ("length", free[3, 0].text)
    for ref in (4, 5):  # some character of the text takes more than one token
        pieces = [tokenizer.token_bytes(token) for token in whole[ref, 0].ids]
        assert any(not _decodes(piece) for piece in pieces)
        assert not whole[ref, 0].text.isascii()
    assert len(whole[6, 0].logprobs) == len(whole[6, 0].ids)
    assert whole[7, 0].ids != whole[7, 1].ids
    assert len(whole[9, 0].ids) == 8
    assert whole[9, 0].end == "stop"
    prompt = whole[10, 0].prompt
    assert prompt is not None
    assert "".join(token.token for token in prompt) == "The sun"
    assert whole[10, 1].prompt is None


def _decodes(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


# ---------------------------------------------------------------- a tiny one, in odd places


def test_killed_once_or_twice_at_any_steps_a_tiny_model_says_the_same(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    write_model(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    limits = TINY_LIMITS
    runner = load_runner(tmp_path, slots=limits.slots, context_tokens=limits.context_tokens, threads=1)
    sequences = [
        make_sequence(1, range(3, 30), 6, n=2, logprobs=2, prompt_logprobs=1),
        make_sequence(2, (5, 6, 7) * 9, 7, temperature=0.0, stop=("\n",)),
        make_sequence(3, range(40, 59), 5, seed=-1, presence_penalty=1.5, min_tokens=4, logit_bias={"2": 9.0}),
    ]
    whole = answered(runner, tokenizer, limits, sequences)
    for first in range(14):
        for second in (None, first % 3, 5):
            world = World(runner, tokenizer, limits, sequences)
            world.live(first)
            world.die()
            if second is not None:
                world.live(second)
                world.die()
            assert not world.live()
            assert dict(world.seen) == whole, f"killed after steps {first} and {second}"
