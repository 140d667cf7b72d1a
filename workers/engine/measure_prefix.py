"""`python -m workers.engine.measure_prefix`: what a prefix cache hit saves, with MILLSTREAM_MODEL_DIR.

Each round asks a prompt twice under a tenant of its own: the first time nothing of it is kept, the second time all but
its end. Both answers, and the logprobs of both, must be the same. Without Kafka and HTTP.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

from wire.errors import SettingsError
from wire.messages import Logprob, Ref, Sampling
from wire.settings import Settings
from workers.engine.errors import EngineError, SequenceRefused
from workers.engine.make import config_of, make_engine, make_vocabulary
from workers.engine.protocol import Engine, Key, Sequence

_PROMPT_TOKENS = 1_500
_ANSWER_TOKENS = 12
_ROUNDS = 3
Answer = tuple[list[int], list[Logprob]]


def main() -> int:
    """Exit status 0, or 1 after a sentence that says what is wrong."""
    try:
        config = config_of(Settings.from_env(os.environ))
        return _measure(make_engine(config, make_vocabulary(config)), config.context_tokens)
    except (EngineError, SettingsError) as exc:
        print(exc, file=sys.stderr)
        return 1


def _measure(engine: Engine, context_tokens: int) -> int:
    tokens = min(_PROMPT_TOKENS, context_tokens - _ANSWER_TOKENS)
    times_ms: list[tuple[float, float]] = []
    for number in range(_ROUNDS):
        (first_ms, _, answer), (second_ms, cached, again) = (_ask(engine, number, turn, tokens) for turn in (0, 1))
        if answer != again:
            print("the answers differ", file=sys.stderr)
            return 1
        times_ms.append((first_ms, second_ms))
        print(
            f"{tokens} tokens: {first_ms:,.0f} ms; with {cached} of them cached: {second_ms:,.0f} ms; the same answer"
        )
    print("medians: {:,.0f} ms, {:,.0f} ms".format(*map(statistics.median, zip(*times_ms, strict=True))))
    return 0


def _ask(engine: Engine, number: int, turn: int, tokens: int) -> tuple[float, int, Answer]:
    """Time to the first token, prompt tokens found in the cache, and the answer."""
    engine.add(
        Sequence(
            key=Key(0, 0, Ref(number * 2 + turn)),
            prompt=tuple(100 + (number * 31 + at * 7 + at // 50) % 200 for at in range(tokens)),
            max_tokens=_ANSWER_TOKENS,
            sampling=Sampling(seed=number),
            ignore_eos=True,
            logprobs=2,
            tenant=f"tenant {number}",
        )
    )
    began_s, first_ms, cached = time.perf_counter(), 0.0, 0
    ids: list[int] = []
    logprobs: list[Logprob] = []
    while engine.busy():
        for emission in engine.step():
            if emission.error is not None:
                raise SequenceRefused(emission.error)
            first_ms = first_ms or (time.perf_counter() - began_s) * 1_000
            cached += emission.cached_tokens or 0
            ids += emission.ids
            logprobs += emission.logprobs or ()
    return first_ms, cached, (ids, logprobs)


if __name__ == "__main__":
    sys.exit(main())
