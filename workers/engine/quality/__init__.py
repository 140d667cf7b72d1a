"""What a numerics class costs: perplexity, and agreement in the likeliest token, on texts that ship with the engine.

Measured once, when a model is converted, and kept beside it; a class that costs too much is no default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from workers.engine.errors import ModelUnusable
from workers.engine.forward import Logits, Runner
from workers.engine.native.build import kernels
from workers.engine.native.runner import NativeRunner
from workers.engine.native.weights import load
from workers.engine.numerics import BF16, NATIVE, Numerics
from workers.engine.tokenizer import Tokenizer

RECORD = "quality.json"
TEXTS = ("mill", "station")
MOST_COST = 0.01
"""of the reference's perplexity, for a class that is chosen unasked"""
_PIECE = 256
_THREADS = 2


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """A class beside the reference, on one text."""

    text: str
    tokens: int
    perplexity: float
    reference: float
    """the perplexity of class bf16"""
    agreement: float
    """share of positions at which both have the same likeliest token"""

    @property
    def cost(self) -> float:
        """0.01 = one per cent more perplexity."""
        return self.perplexity / self.reference - 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What `record` found for a model."""

    default: str
    classes: dict[str, tuple[Cost, ...]]


@dataclass(frozen=True, slots=True)
class Scored:
    """A text under one class."""

    perplexity: float
    likeliest: npt.NDArray[np.int64]


def record(model_dir: Path) -> Record:
    """Measure the classes of a converted model and write it down beside them; needs the kernels. ModelUnusable."""
    texts = texts_of(model_dir)
    reference = _scores(model_dir, BF16, texts)
    classes = {
        numerics.name: tuple(_costs(texts, _scores(model_dir, numerics, texts), reference))
        for numerics in NATIVE.values()
        if numerics is not BF16
    }
    made = Record(default=chosen(classes), classes=classes)
    (model_dir / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(made)))
    return made


def chosen(classes: dict[str, tuple[Cost, ...]]) -> str:
    """The fastest class that is good enough on every text; the reference if none is."""
    good = (name for name in NATIVE if name in classes and all(cost.cost <= MOST_COST for cost in classes[name]))
    return next(good, BF16.name)


def default_of(model_dir: Path) -> str | None:
    """The class a model runs in if none is asked for; None if that was never measured. ModelUnusable."""
    found = recorded(model_dir)
    return None if found is None else found.default


def recorded(model_dir: Path) -> Record | None:
    """What `record` wrote. ModelUnusable."""
    path = model_dir / RECORD
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record) if path.is_file() else None
    except (OSError, msgspec.DecodeError) as exc:
        raise ModelUnusable(f"{path} is broken; delete the directory, and `millstream up` makes it again") from exc


def score(runner: Runner, ids: Sequence[int]) -> Scored:
    """How well a model foretells a text: perplexity of ids[1:], and its likeliest token at each position."""
    surprise, likeliest = 0.0, []
    for start in range(0, len(ids) - 1, _PIECE):
        end = min(start + _PIECE, len(ids) - 1)
        logits = runner.score(ids[start:end], start)
        if not np.isfinite(logits).all():
            raise ModelUnusable("its numbers are none: the model gave no usable numbers for a plain text")
        surprise += float(-_log_shares(logits)[np.arange(end - start), np.array(ids[start + 1 : end + 1])].sum())
        likeliest.append(logits.argmax(axis=1))
    return Scored(float(np.exp(surprise / (len(ids) - 1))), np.concatenate(likeliest))


def _log_shares(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    shares: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shares


def texts_of(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Token ids of the texts, by name. ModelUnusable."""
    tokenizer = Tokenizer.load(model_dir)
    return {name: tuple(tokenizer.encode_plain((Path(__file__).parent / f"{name}.txt").read_text())) for name in TEXTS}


def _scores(model_dir: Path, numerics: Numerics, texts: dict[str, tuple[int, ...]]) -> dict[str, Scored]:
    library = kernels()
    if library is None:
        raise ModelUnusable("the quality of a numerics class can't be measured without a C++ compiler")
    longest = max(map(len, texts.values()))
    runner = NativeRunner(library, load(model_dir, numerics), slots=1, context_tokens=longest, threads=_THREADS)
    return {name: score(runner, ids) for name, ids in texts.items()}


def _costs(texts: dict[str, tuple[int, ...]], mine: dict[str, Scored], reference: dict[str, Scored]) -> list[Cost]:
    return [
        Cost(
            text=name,
            tokens=len(ids),
            perplexity=mine[name].perplexity,
            reference=reference[name].perplexity,
            agreement=float((mine[name].likeliest == reference[name].likeliest).mean()),
        )
        for name, ids in texts.items()
    ]
