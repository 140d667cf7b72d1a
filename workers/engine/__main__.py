"""`python -m workers.engine FD`: an engine in a process of its own, started by `workers.engine.host`."""

from __future__ import annotations

import logging
import signal
import socket
import sys

from workers.engine.child import Child
from workers.engine.errors import EngineError
from workers.engine.parent import die_with

_log = logging.getLogger("millstream.engine")


def main(argv: list[str]) -> int:
    """Exit status 0 after a wanted end, 1 after a sentence that says what was wrong, 2 for a wrong call."""
    if len(argv) != 3 or not argv[1].isdigit() or not argv[2].isdigit():
        print("the worker starts this process itself: run `python -m workers`", file=sys.stderr)
        return 2
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    die_with(parent=int(argv[2]))
    with socket.socket(fileno=int(argv[1])) as link:
        child = Child(link)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C reaches the whole group: the parent decides
        signal.signal(signal.SIGTERM, lambda _signal, _frame: child.stop())
        try:
            child.serve()
        except EngineError as exc:
            _log.error("%s", exc)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
