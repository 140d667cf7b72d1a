"""Where things lie on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """What can be fetched or made again, shared by every installation of this user: Kafka's jars, converted models.

    $XDG_CACHE_HOME/millstream, or ~/.cache/millstream. It need not exist yet.
    """
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "millstream"
