"""Whether the ports that a stack needs are free, before anything is started, and that no other stack takes them."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Collection, Iterable
from contextlib import ExitStack
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


class Claims(ExitStack):
    """Ports that are this stack's from before its processes listen on them until it ends.

    Of two starts at the same moment the later one finds them claimed: neither can take the other's broker for its own.
    A claim is a name in the kernel's table of abstract sockets, which like ports is one of the network namespace, and
    is gone with its process. Where there is no such table, only what listens already is noticed.
    """

    def take(self, port: int) -> bool:
        """Claim a port; False if another start has it."""
        if sys.platform != "linux":
            return True
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0millstream-port-{port}")
        except OSError:
            claim.close()
            return False
        self.enter_context(claim)
        return True


def settle(wanted: Iterable[Wanted], claims: Claims) -> tuple[int, ...]:
    """The ports to use, claimed, in the order asked for. PortTaken names the first that is in use, or wanted twice."""
    chosen: list[int] = []
    for want in wanted:
        port = want.port or _any_port(claims, chosen)
        if port in chosen:
            raise PortTaken(f"port {port} is wanted twice; give {want.what} another with {want.option}")
        if not _is_free(port) or (want.port and not claims.take(port)):
            raise PortTaken(
                f"port {port}, wanted for {want.what}, is in use; end what uses it, or choose another with"
                f" {want.option} (0 = any free port)"
            )
        chosen.append(port)
    return tuple(chosen)


def _any_port(claims: Claims, not_these: Collection[int]) -> int:
    while not claims.take(port := free_port(not_these)):
        pass
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # A port whose last connections are in TIME_WAIT is free for a server: all of ours set this option too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
