"""`python -m workers.engine.measure`: how fast the engine of MILLSTREAM_MODEL_DIR is here, as a table.

Each row: so many streams at once, 64 prompt tokens and 64 generated ones each, the whole engine (scheduler, model,
sampler, text), without Kafka and HTTP. GOMP_SPINCOUNT=1000, as the worker sets it, suits cores that other processes
use too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from wire.errors import SettingsError
from wire.messages import Ref, Sampling
from wire.settings import Settings
from workers.engine.errors import EngineError
from workers.engine.make import config_of, make_engine, make_vocabulary
from workers.engine.protocol import Engine, Key, Sequence

_PROMPT_TOKENS = 64
_ANSWER_TOKENS = 64
_STREAMS = (1, 8, 32)
_LONG_TOKENS = 1024


def main() -> int:
    """Exit status 0, or 1 after a sentence that says what is wrong."""
    began_s = time.perf_counter()
    try:
        config = config_of(Settings.from_env(os.environ))
        engine = make_engine(config, make_vocabulary(config))
    except (EngineError, SettingsError) as exc:
        print(exc, file=sys.stderr)
        return 1
    print(f"{engine.fingerprint}, {config.threads} threads, ready after {time.perf_counter() - began_s:.1f} s")
    long = min(_LONG_TOKENS, config.context_tokens - 1)
    print(f"prefill of {long} tokens: {long / _prefill_s(engine, long):,.0f} tokens/s")
    for streams in _STREAMS:
        if streams <= config.slots:
            print(f"{streams:3} streams: {_decode_tokens_per_s(engine, streams):6,.1f} tokens/s")
    return 0


def _prefill_s(engine: Engine, tokens: int) -> float:
    engine.add(_sequence(0, tokens, 1))
    return _seconds(engine, until=lambda: not engine.busy())


def _decode_tokens_per_s(engine: Engine, streams: int) -> float:
    """Once every stream has its first token."""
    counted = 0
    for ref in range(streams):
        engine.add(_sequence(ref, _PROMPT_TOKENS, _ANSWER_TOKENS))
    first: set[int] = set()
    while len(first) < streams:
        first |= {emission.key.ref for emission in engine.step()}
    began_s = time.perf_counter()
    while engine.load().running == streams:
        counted += sum(len(emission.ids) for emission in engine.step())
    seconds = time.perf_counter() - began_s
    _seconds(engine, until=lambda: not engine.busy())
    return counted / seconds


def _seconds(engine: Engine, until: Callable[[], bool]) -> float:
    began_s = time.perf_counter()
    while not until():
        engine.step()
    return time.perf_counter() - began_s


def _sequence(ref: int, prompt_tokens: int, answer_tokens: int) -> Sequence:
    return Sequence(
        key=Key(0, 0, Ref(ref)),
        prompt=tuple(100 + (ref * 31 + at * 7) % 200 for at in range(prompt_tokens)),
        max_tokens=answer_tokens,
        sampling=Sampling(seed=ref),
        ignore_eos=True,
    )


if __name__ == "__main__":
    sys.exit(main())
