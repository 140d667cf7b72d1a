"""`python -m workers.engine.measure`: runs the engine of MILLSTREAM_MODEL_DIR as `millstream bench engine` asks it to.

The whole engine (scheduler, model, sampler, text), without Kafka and HTTP. A line of JSON in, one out: {"value": …}.
    {"what": "prefill", "tokens": n}                                  → prompt tokens/s
    {"what": "decode", "streams": n, "context": n, "tokens": n, "full": bool}  → tokens/s of all streams together
    {"what": "perplexity", "ids": […]}
"full": sampling, two stop strings and log-probabilities; else the likeliest token is taken.
"""

from __future__ import annotations

import os
import sys
import time

import msgspec

from wire.errors import SettingsError
from wire.messages import Ref, Sampling
from wire.settings import Settings
from workers.engine.errors import EngineError
from workers.engine.make import config_of, make_engine, make_vocabulary
from workers.engine.protocol import Engine, Key, Sequence
from workers.engine.quality import score
from workers.engine.runner import load_runner

FULL = Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=1, frequency_penalty=0.1)
PLAIN = Sampling(temperature=0.0, seed=1)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured."""

    what: str
    tokens: int = 0
    streams: int = 1
    context: int = 64
    full: bool = False
    ids: tuple[int, ...] = ()


def main() -> int:
    """Exit status 0, or 1 after a sentence that says what is wrong."""
    try:
        settings = Settings.from_env(os.environ)
        config = config_of(settings)
        engine = make_engine(config, make_vocabulary(config))
    except (EngineError, SettingsError) as exc:
        print(exc, file=sys.stderr)
        return 1
    print('{"ready": true}', flush=True)
    for line in sys.stdin:
        ask = msgspec.json.decode(line, type=Ask)
        value = _perplexity(settings, ask.ids) if ask.what == "perplexity" else _rate(engine, ask)
        print(msgspec.json.encode({"value": value}).decode(), flush=True)
    return 0


def _rate(engine: Engine, ask: Ask) -> float:
    """Tokens a second."""
    if ask.what == "prefill":
        began_s = time.perf_counter()
        engine.add(_sequence(0, ask, max_tokens=1, prompt_tokens=ask.tokens))
        _finish(engine)
        return ask.tokens / (time.perf_counter() - began_s)
    for ref in range(ask.streams):
        engine.add(_sequence(ref, ask, max_tokens=ask.tokens, prompt_tokens=ask.context))
    first: set[Ref] = set()
    while len(first) < ask.streams:
        first |= {emission.key.ref for emission in engine.step()}
    began_s, counted = time.perf_counter(), 0
    while engine.load().running == ask.streams:
        counted += sum(len(emission.ids) for emission in engine.step())
    rate = counted / (time.perf_counter() - began_s)
    _finish(engine)
    return rate


def _finish(engine: Engine) -> None:
    while engine.busy():
        engine.step()


def _sequence(ref: int, ask: Ask, *, max_tokens: int, prompt_tokens: int) -> Sequence:
    sampling = FULL if ask.full else PLAIN
    return Sequence(
        key=Key(0, 0, Ref(ref)),
        prompt=tuple(100 + (ref * 31 + at * 7) % 200 for at in range(prompt_tokens)),
        max_tokens=max_tokens,
        sampling=msgspec.structs.replace(sampling, seed=ref),
        ignore_eos=True,
        stop=("\n\nquestion", "never said so") if ask.full else (),
        logprobs=2 if ask.full else None,
    )


def _perplexity(settings: Settings, ids: tuple[int, ...]) -> float:
    assert settings.model_dir is not None
    runner = load_runner(
        settings.model_dir,
        slots=1,
        context_tokens=len(ids),
        threads=settings.engine_threads,
        numerics=settings.numerics,
    )
    return score(runner, ids).perplexity


if __name__ == "__main__":
    sys.exit(main())
