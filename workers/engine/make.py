"""From settings to an engine and a vocabulary. Imports what was asked for, and only when it is."""

from __future__ import annotations

import time
from dataclasses import replace
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

CHUNK_TOKENS = 64
"""a piece of a prompt and a block of the prefix cache: about a link of a prefix chain"""
STEP_TOKENS = 256
GPU_CHUNK_TOKENS = 256
"""a page of the cache, so that the prefix cache shares pages instead of copying"""
GPU_STEP_TOKENS = 4096
"""enough rows to keep a GPU's arithmetic busy: all pieces of a step are computed in one pass"""


def config_of(settings: Settings) -> Config:
    """What concerns an engine process."""
    return Config(
        kind=settings.engine_kind,
        slots=settings.engine_slots,
        threads=settings.engine_threads,
        context_tokens=settings.context_tokens,
        prefix_tokens=settings.engine_prefix_tokens,
        model_dir=None if settings.model_dir is None else str(settings.model_dir),
        simulated_ttft_ms=settings.simulated_ttft_ms,
        simulated_tbt_ms=settings.simulated_tbt_ms,
        log_level=settings.log_level,
        device=settings.engine_device,
        numerics=settings.numerics,
    )


def make_vocabulary(config: Config) -> Vocabulary:
    """The tokens of the model that an engine of this configuration runs. ModelUnusable."""
    if config.kind == "simulated":
        return SimulatedVocabulary()
    from workers.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(_model_dir(config))
    _ = tokenizer.grammars  # made now, while nobody waits
    return tokenizer


def make_engine(config: Config, vocabulary: Vocabulary, *, sleep: Sleep = time.sleep) -> Engine:
    """The engine, loaded and warm. `sleep`: how a simulated one waits. ModelUnusable."""
    limits = Limits(
        slots=config.slots,
        context_tokens=config.context_tokens,
        kv_tokens=config.slots * config.context_tokens,
        chunk_tokens=CHUNK_TOKENS,
        step_tokens=STEP_TOKENS,
    )
    if config.kind == "simulated":
        pace = Pace(ttft_ms=config.simulated_ttft_ms, tbt_ms=config.simulated_tbt_ms)
        return SimulatedEngine(_keeping(limits, config), pace, sleep=sleep)
    if config.device != "cpu":
        from workers.engine.gpu.engine import load_engine as load_paged

        limits = replace(limits, chunk_tokens=GPU_CHUNK_TOKENS, step_tokens=GPU_STEP_TOKENS)
        return load_paged(
            _model_dir(config),
            vocabulary,
            _keeping(limits, config),
            device=config.device,
            numerics=config.numerics,
            threads=config.threads,
        )
    from workers.engine.torch_engine import load_engine

    return load_engine(
        _model_dir(config),
        vocabulary,
        _keeping(limits, config),
        threads=config.threads,
        numerics=checked(config.numerics),
    )


def _keeping(limits: Limits, config: Config) -> Limits:
    """With the prefix cache that is asked for, of an engine that can keep blocks."""
    return replace(limits, prefix_blocks=config.prefix_tokens // limits.chunk_tokens)


def _model_dir(config: Config) -> Path:
    if config.model_dir is None:
        raise ModelUnusable("MILLSTREAM_MODEL_DIR is not set; `millstream up` makes a model and sets it")
    return Path(config.model_dir)
