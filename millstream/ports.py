"""Whether the ports that a stack needs are free, before anything is started."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from millstream.errors import PortTaken
from millstream.runfile import HOST

_UNCLAIMED = range(20_000, 32_768)
_chance = random.SystemRandom()
"""no seed: two processes that look at the same moment must not find the same port"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A port, what for, and the option that changes it. Port 0 = any free one."""

    port: int
    what: str
    option: str


def free_port(not_these: Collection[int] = ()) -> int:
    """A port that nothing listens on just now.

    Below those that the kernel gives to outgoing connections: one of these could be gone before it is listened on.
    """
    while True:
        port = _chance.choice(_UNCLAIMED)
        if port not in not_these and _is_free(port):
            return port


def settle(wanted: Iterable[Wanted]) -> tuple[int, ...]:
    """The ports to use, in the order asked for. PortTaken names the first that is in use, or wanted twice."""
    chosen: list[int] = []
    for want in wanted:
        port = want.port or free_port(chosen)
        if port in chosen:
            raise PortTaken(f"port {port} is wanted twice; give {want.what} another with {want.option}")
        if not _is_free(port):
            raise PortTaken(
                f"port {port}, wanted for {want.what}, is in use; end what uses it, or choose another with"
                f" {want.option} (0 = any free port)"
            )
        chosen.append(port)
    return tuple(chosen)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # A port whose last connections are in TIME_WAIT is free for a server: all of ours set this option too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
