"""The other ranks of a model: processes of their own below the engine process, which is rank 0.

Rank 0 tells each of them every step over its standard input; results they exchange with torch.distributed. A rank that
dies would leave the others waiting in an exchange, so a thread beside rank 0 waits for each and ends the engine process
when one ends: the worker then sees a dead engine, records the Crash and starts all of it again. When rank 0 dies, the
kernel ends the others.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

import msgspec
import torch

from workers.engine.errors import EngineError
from workers.engine.gpu.build import Setup, build
from workers.engine.gpu.runner import Order
from workers.engine.parent import die_with

_LENGTH = struct.Struct("<I")
_setups = msgspec.msgpack.Decoder(Setup)
_orders = msgspec.msgpack.Decoder(Order)
_log = logging.getLogger("millstream.engine")


class Followers:
    """Owns the processes of ranks 1 and up."""

    def __init__(self, setup: Setup) -> None:
        """Start them; `setup` is rank 0's. It has to be built at the same time, or they wait for it."""
        self._processes = [_start(rank) for rank in range(1, setup.ranks)]
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=_end_with, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
            _send(process, msgspec.structs.replace(setup, rank=rank))

    def tell(self, order: Order) -> None:
        """What all ranks do next."""
        for process in self._processes:
            _send(process, order)


def _start(rank: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "workers.engine.gpu.follow", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )


def _end_with(rank: int, process: subprocess.Popen[bytes]) -> None:
    status = process.wait()
    _log.error("rank %d ended with status %d, and the engine with it", rank, status)
    os._exit(1)  # the main thread may wait in an exchange for ever, and can't be interrupted there


def _send(process: subprocess.Popen[bytes], said: Setup | Order) -> None:
    body = msgspec.msgpack.encode(said)
    assert process.stdin is not None
    try:
        process.stdin.write(_LENGTH.pack(len(body)) + body)
        process.stdin.flush()
    except BrokenPipeError:
        threading.Event().wait()  # it is dead: the thread that watches it ends this process, and says why


def _bodies(stream: BinaryIO) -> Iterator[bytes]:
    """Messages until the other side is gone."""
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        (size,) = _LENGTH.unpack(head)
        if len(body := stream.read(size)) < size:
            return
        yield body


def main(argv: list[str]) -> int:
    """Exit status 0 when rank 0 is gone, 1 after a sentence that says what was wrong, 2 for a wrong call."""
    if len(argv) != 2 or not argv[1].isdigit():
        print("the engine starts this process itself: run `python -m workers`", file=sys.stderr)
        return 2
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    die_with(parent=int(argv[1]))
    bodies = _bodies(sys.stdin.buffer)
    try:
        rank = build(_setups.decode(next(bodies))).rank
    except EngineError as exc:
        _log.error("%s", exc)
        return 1
    with torch.inference_mode():
        for body in bodies:
            rank.obey(_orders.decode(body))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
