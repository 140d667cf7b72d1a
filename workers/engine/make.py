"""From settings to an engine and a vocabulary. Imports what was asked for, and only when it is."""

from __future__ import annotations

import time
from pathlib import Path

from wire.settings import Settings
from workers.engine.errors import ModelUnusable
from workers.engine.link import Config
from workers.engine.numerics import checked
from workers.engine.protocol import Engine
from workers.engine.scheduler import Limits
from workers.engine.simulated import Pace, SimulatedEngine, Sleep
from workers.engine.simulated_vocabulary import SimulatedVocabulary
from workers.engine.vocabulary import Vocabulary

CHUNK_TOKENS = 256


def config_of(settings: Settings) -> Config:
    """What concerns an engine process."""
    return Config(
        kind=settings.engine_kind,
        slots=settings.engine_slots,
        threads=settings.engine_threads,
        context_tokens=settings.context_tokens,
        model_dir=None if settings.model_dir is None else str(settings.model_dir),
        simulated_ttft_ms=settings.simulated_ttft_ms,
        simulated_tbt_ms=settings.simulated_tbt_ms,
        log_level=settings.log_level,
        numerics=settings.numerics,
    )


def make_vocabulary(config: Config) -> Vocabulary:
    """The tokens of the model that an engine of this configuration runs. ModelUnusable."""
    if config.kind == "simulated":
        return SimulatedVocabulary()
    from workers.engine.tokenizer import Tokenizer

    return Tokenizer.load(_model_dir(config))


def make_engine(config: Config, vocabulary: Vocabulary, *, sleep: Sleep = time.sleep) -> Engine:
    """The engine, loaded and warm. `sleep`: how a simulated one waits. ModelUnusable."""
    limits = Limits(
        slots=config.slots,
        context_tokens=config.context_tokens,
        kv_tokens=config.slots * config.context_tokens,
        chunk_tokens=CHUNK_TOKENS,
        step_tokens=CHUNK_TOKENS,
    )
    if config.kind == "simulated":
        pace = Pace(ttft_ms=config.simulated_ttft_ms, tbt_ms=config.simulated_tbt_ms)
        return SimulatedEngine(limits, pace, sleep=sleep)
    from workers.engine.torch_engine import load_engine

    return load_engine(
        _model_dir(config), vocabulary, limits, threads=config.threads, numerics=checked(config.numerics)
    )


def _model_dir(config: Config) -> Path:
    if config.model_dir is None:
        raise ModelUnusable("MILLSTREAM_MODEL_DIR is not set; `millstream up` makes a model and sets it")
    return Path(config.model_dir)
