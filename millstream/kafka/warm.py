"""Half of a broker's start is loading classes. The JVM keeps them in an archive, made once beside the jars."""

from __future__ import annotations

import logging
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

STARTED = "Kafka Server started"
"""what the broker logs when it is up; `log4j2.properties` lets it through"""
_WITHIN_S = 120.0
_NAME = "classes.jsa"


def archive(jar_dir: Path) -> Path | None:
    """The archive of these jars, if it has been made."""
    found = jar_dir / _NAME
    return found if found.exists() else None


def make_archive(jar_dir: Path, argv: Callable[[Path], list[str]]) -> None:
    """Start a broker for a moment and keep what it loaded. `argv`: the command line of one in an empty directory.

    A failure costs nothing but the time it would have saved.
    """
    with tempfile.TemporaryDirectory(prefix="kafka-warm-") as scratch:
        fresh = jar_dir / f"{Path(scratch).name}.jsa"
        java, *rest = argv(Path(scratch))
        broker = subprocess.Popen(
            [java, f"-XX:ArchiveClassesAtExit={fresh}", *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        limit = threading.Timer(_WITHIN_S, broker.kill)
        limit.start()
        try:
            assert broker.stdout is not None
            if _started(broker.stdout):
                broker.terminate()
            broker.communicate()
        finally:
            limit.cancel()
            broker.kill()
            broker.wait()
        if fresh.exists():
            fresh.rename(jar_dir / _NAME)
        else:
            _log.info("no archive of Kafka's classes was made; the broker starts without")


def _started(lines: Iterator[str]) -> bool:
    return any(STARTED in line for line in lines)
