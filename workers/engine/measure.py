"""`python -m workers.engine.measure`: runs the engine of MILLSTREAM_MODEL_DIR as `millstream bench engine` asks it to.

The whole engine (scheduler, model, sampler, text), without Kafka and HTTP. A line of JSON in, one out: {"value": …}.
    {"what": "prefill", "tokens": n}                                           → prompt tokens/s
    {"what": "decode", "streams": n, "context": n, "tokens": n, "full": bool}  → tokens/s of all streams together
    {"what": "decode", …, "guess": bool, "ids": […]}                           → the same, for prompts of these tokens
    {"what": "perplexity", "ids": […]}
"full": sampling, two stop strings and log-probabilities; else the likeliest token is taken. Nothing is guessed but with
"guess", and no prompt is found in a cache: all others compute all they say, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence as Seq

import msgspec

from wire.errors import SettingsError
from wire.messages import Ref, Sampling
from wire.settings import Settings
from workers.engine.errors import EngineError
from workers.engine.make import config_of, make_engine, make_vocabulary
from workers.engine.protocol import Emission, Key, Sequence
from workers.engine.quality import score
from workers.engine.runner import load_runner
from workers.engine.torch_engine import TorchEngine

FULL = Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=1, frequency_penalty=0.1)
PLAIN = Sampling(temperature=0.0, seed=1)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured."""

    what: str
    tokens: int = 0
    streams: int = 1
    context: int = 64
    full: bool = False
    guess: bool = False
    ids: tuple[int, ...] = ()
    """the text, or what prompts are made of instead of numbers"""


def main() -> int:
    """Exit status 0, or 1 after a sentence that says what is wrong."""
    try:
        settings = Settings.from_env(os.environ)
        config = config_of(settings)
        engine = make_engine(config, make_vocabulary(config))
        if not isinstance(engine, TorchEngine):
            raise EngineError("a simulated engine has no speed to measure; set MILLSTREAM_ENGINE_KIND to torch")
    except (EngineError, SettingsError) as exc:
        print(exc, file=sys.stderr)
        return 1
    print('{"ready": true}', flush=True)
    for line in sys.stdin:
        ask = msgspec.json.decode(line, type=Ask)
        try:
            value = _perplexity(settings, ask.ids) if ask.what == "perplexity" else _rate(engine, ask)
        except EngineError as exc:
            print(f"{ask.what}: {exc}", file=sys.stderr)
            return 1
        print(msgspec.json.encode({"value": value}).decode(), flush=True)
    return 0


def _rate(engine: TorchEngine, ask: Ask) -> float:
    """Tokens a second. EngineError when a request fails."""
    engine.guess(ask.guess)
    if ask.what == "prefill":
        began_s = time.perf_counter()
        engine.add(_sequence(0, ask, max_tokens=1, prompt_tokens=ask.tokens))
        while engine.busy():
            _step(engine)
        return ask.tokens / (time.perf_counter() - began_s)
    room = engine.limits.context_tokens - ask.context
    for ref in range(ask.streams):
        engine.add(_sequence(ref, ask, max_tokens=room, prompt_tokens=ask.context))
    first: set[Ref] = set()
    while len(first) < ask.streams:
        first |= {emission.key.ref for emission in _step(engine)}
    began_s, counted = time.perf_counter(), 0
    while counted < ask.streams * ask.tokens:
        counted += sum(len(emission.ids) for emission in _step(engine))
        if engine.load().running < ask.streams:
            raise EngineError("a stream ended before it was measured; ask for fewer tokens, or set more context")
    rate = counted / (time.perf_counter() - began_s)
    for ref in first:
        engine.cancel(Key(0, 0, ref))
    return rate


def _step(engine: TorchEngine) -> Seq[Emission]:
    """One step. EngineError when a request fails."""
    emissions = engine.step()
    for emission in emissions:
        if emission.error is not None:
            raise EngineError(f"a request failed: {emission.error}")
    return emissions


def _sequence(ref: int, ask: Ask, *, max_tokens: int, prompt_tokens: int) -> Sequence:
    sampling = FULL if ask.full else PLAIN
    if ask.ids:
        prompt = tuple(ask.ids[(ref * 37 + at) % len(ask.ids)] for at in range(prompt_tokens))
    else:
        prompt = tuple(100 + (ref * 31 + at * 7) % 200 for at in range(prompt_tokens))
    return Sequence(
        key=Key(0, 0, Ref(ref)),
        prompt=prompt,
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
