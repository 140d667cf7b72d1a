"""The engine process: commands in, steps out, one thread.

    commands → who runs → step → report

Commands are obeyed between steps, so a cancelled sequence is gone before the next one. Who runs is said before a step,
and what is taken on before it is: should that be the last thing this process does, its parent knows whom to suspect.
"""

from __future__ import annotations

import select
import socket
from collections import deque

from workers.engine.link import (
    Add,
    Applied,
    Command,
    Config,
    Drop,
    Forget,
    Frames,
    Ready,
    Report,
    Running,
    Stepped,
    Stop,
    Taking,
    frame,
)
from workers.engine.make import make_engine, make_vocabulary
from workers.engine.protocol import Engine

AHEAD_STEPS = 64
"""steps that may wait for the journal; then the engine pauses, so that it never runs far ahead of a log that is away"""
_READ_BYTES = 1 << 20


class Hangup(Exception):
    """The other side is gone, or wants an end."""


class Child:
    """Serves one socket until the other side hangs up."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._wake, self._waker = socket.socketpair()
        self._frames = Frames()
        self._commands: deque[Command] = deque()
        self._stopping = False
        self._steps = 0
        self._applied = 0

    def stop(self) -> None:
        """End after the current step; for signal handlers."""
        self._stopping = True
        self._waker.send(b"x")  # a wait doesn't end by itself when a signal comes (PEP 475)

    def serve(self) -> None:
        """Load the engine the first message asks for, then run it. Returns when told to stop or hung up on."""
        try:
            config = self._configured()
            vocabulary = make_vocabulary(config)
            engine = make_engine(config, vocabulary, sleep=self._wait)
            self._announce(engine, config.context_tokens, vocabulary.vocab_size)
            while not self._stopping:
                self._obey(engine)
                if engine.busy() and not self._ahead:
                    self._step(engine)
                else:
                    self._wait(None)
        except (Hangup, ConnectionError):
            return
        finally:
            self._wake.close()
            self._waker.close()

    @property
    def _ahead(self) -> bool:
        return self._steps - self._applied >= AHEAD_STEPS

    def _configured(self) -> Config:
        while not self._commands and not self._stopping:
            self._wait(None)
            self._receive()
        first = self._commands.popleft() if self._commands else None
        if not isinstance(first, Config):
            raise Hangup
        return first

    def _announce(self, engine: Engine, context_tokens: int, vocab_size: int) -> None:
        self._send(
            Ready(
                fingerprint=engine.fingerprint,
                context_tokens=context_tokens,
                vocab_size=vocab_size,
                load=engine.load(),
                prefixes=engine.prefixes(),
            )
        )

    def _obey(self, engine: Engine) -> None:
        self._receive()
        while self._commands:
            match command := self._commands.popleft():
                case Add():
                    self._send(Taking(key=command.sequence.key))
                    engine.add(command.sequence)
                case Forget():
                    engine.cancel(command.key)
                case Drop():
                    engine.drop(command.shard, command.epoch)
                case Applied():
                    self._applied = max(self._applied, command.step)
                case Stop() | Config():
                    raise Hangup

    def _step(self, engine: Engine) -> None:
        if running := engine.admit():
            self._send(Running(keys=tuple(running)))
        emissions = tuple(engine.step())
        if emissions:
            self._steps += 1
            self._send(Stepped(number=self._steps, emissions=emissions, load=engine.load(), prefixes=engine.prefixes()))

    def _send(self, report: Report) -> None:
        self._link.sendall(frame(report))

    def _receive(self) -> None:
        """Take what has come, without waiting."""
        try:
            while data := self._link.recv(_READ_BYTES, socket.MSG_DONTWAIT):
                self._frames.feed(data)
        except BlockingIOError:
            self._commands.extend(self._frames.commands())
        else:
            raise Hangup

    def _wait(self, seconds: float | None) -> None:
        """Until a command or `stop` comes, or so long."""
        if not self._stopping:
            select.select([self._link, self._wake], [], [], seconds)
