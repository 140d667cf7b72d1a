"""Whether this device, with these libraries, gives a sequence the same bits alone and in company (R8)."""

from __future__ import annotations

import numpy as np

from workers.engine.errors import ModelUnusable
from workers.engine.gpu.pages import Pages
from workers.engine.gpu.runner import PagedRunner
from workers.engine.scheduler import Limits, Work

_PROMPT_TOKENS = 24
_DRAWS = (None,)
"""stands for whoever draws: the runner doesn't look"""


def check_invariance(runner: PagedRunner, pages: Pages, limits: Limits) -> None:
    """ModelUnusable if a prompt or a token is computed differently in a full batch. Warms up what it computes."""
    company = range(1, min(limits.slots, pages.free))
    length = min(_PROMPT_TOKENS, limits.context_tokens - 1)
    alone = [runner.run([_prompt(0, length)]), runner.run([_token(0, length)])]
    beside = [
        runner.run([*(_prompt(slot, 1 + slot % length) for slot in company), _prompt(0, length)])[-1:],
        runner.run([*(_token(slot, 1 + slot % length) for slot in company), _token(0, length)])[-1:],
    ]
    runner.release(range(limits.slots))
    if not all(map(np.array_equal, alone, beside)):
        raise ModelUnusable(
            "this device's results for a sequence depend on what runs beside it; report the GPU and torch's version"
        )


def _prompt(slot: int, tokens: int) -> Work:
    ids = tuple((slot * 7 + at) % 97 for at in range(tokens))
    return Work(slot=slot, start=0, ids=ids, stepwise=False, draws=_DRAWS)  # type: ignore[arg-type]


def _token(slot: int, position: int) -> Work:
    return Work(slot=slot, start=position, ids=(slot % 97,), stepwise=True, draws=_DRAWS)  # type: ignore[arg-type]
