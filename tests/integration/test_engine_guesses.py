"""With guesses or without, right ones or wrong ones: the same tokens, text, logprobs and endings."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch
from engine_world import LIMITS, Told, make_sequence, run, write_model

from millstream.model import prepare
from millstream.paths import cache_dir
from workers.engine.protocol import Sequence
from workers.engine.runner import Logits, Runner, load_runner
from workers.engine.scheduler import Limits, Work
from workers.engine.speculation import COUNTS, Gain, Speculation
from workers.engine.tokenizer import Tokenizer
from workers.engine.torch_engine import TorchEngine


class Fixed(Gain):
    """Always wants so many."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def best(self, hit_rates: Seq[float], rows: int) -> int:
        return self._count

    def worth(self, hit_rate: float) -> bool:
        return True


class Wild(Speculation):
    """Guesses anything: mostly wrong, and any number of tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__(Fixed(7))
        self._random = random.Random(seed)

    def extended(self, work: Seq[Work]) -> list[Work]:
        return [self._guessed(item) for item in super().extended(work)]

    def _guessed(self, item: Work) -> Work:
        if not item.guesses:
            return item
        cut = self._random.randrange(item.guesses + 1)
        kept = item.ids[: len(item.ids) - item.guesses + cut]
        wrong = tuple(self._random.randrange(3, 250) for _ in range(item.guesses - cut))
        return replace(item, ids=kept + wrong)


class Counted:
    """A runner that counts its steps."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.fingerprint = runner.fingerprint
        self.steps = 0

    def run(self, work: Seq[Work]) -> Logits:
        self.steps += 1
        return self._runner.run(work)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    torch.set_num_threads(1)
    model_dir = write_model(tmp_path_factory.mktemp("model"))
    return load_runner(model_dir, slots=LIMITS.slots, context_tokens=LIMITS.context_tokens, threads=1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("tokenizer")))


def said(
    runner: Runner, tokenizer: Tokenizer, limits: Limits, speculation: Speculation, sequences: Seq[Sequence]
) -> tuple[dict[tuple[int, int], Told], int]:
    """What the engine says, and in how many steps."""
    counted = Counted(runner)
    engine = TorchEngine(counted, tokenizer, limits, speculation=speculation)  # type: ignore[arg-type]
    return run(engine, *sequences), counted.steps


def mixed(seed: int) -> list[Sequence]:
    """Prompts that repeat themselves, and all that sampling has."""
    unit = tuple(range(10 + seed % 40, 13 + seed % 40))
    biased = {str(token): 9.0 for token in unit}
    return [
        make_sequence(1, unit * 6, 20, seed=seed, logit_bias=biased, temperature=0.7, logprobs=2),
        make_sequence(2, unit * 5, 25, temperature=0.0, logit_bias=biased, frequency_penalty=0.4, presence_penalty=0.2),
        make_sequence(3, (*unit, 99) * 4, 18, n=2, seed=seed, logit_bias=biased, repetition_penalty=1.2, top_k=5),
        make_sequence(4, unit * 4, 15, seed=seed, logit_bias={**biased, "2": 6.0}, min_tokens=4, top_p=0.9),
        make_sequence(5, unit * 4, 15, seed=seed, logit_bias=biased, min_p=0.1, stop=("+,", "\n")),
    ]


@pytest.mark.parametrize("seed", range(12))
def test_guesses_change_nothing_but_the_number_of_steps(runner: Runner, tokenizer: Tokenizer, seed: int) -> None:
    plain, steps = said(runner, tokenizer, LIMITS, Speculation(Fixed(0)), mixed(seed))
    for count in COUNTS:
        told, fewer = said(runner, tokenizer, LIMITS, Speculation(Fixed(count)), mixed(seed))
        assert told == plain
        assert fewer < steps
    assert said(runner, tokenizer, LIMITS, Wild(seed), mixed(seed))[0] == plain
    assert said(runner, tokenizer, LIMITS, Speculation(), mixed(seed))[0] == plain


def test_a_stop_string_and_an_ending_among_right_guesses_cut_there(runner: Runner, tokenizer: Tokenizer) -> None:
    unit = (40, 41, 42)  # "%&'"
    loop = make_sequence(1, unit * 6, 20, temperature=0.0, logit_bias={str(token): 50.0 for token in unit})
    whole = said(runner, tokenizer, LIMITS, Speculation(Fixed(0)), [loop])[0][1, 0]
    stops = {whole.text[at : at + 3] for at in range(6)}
    for stop in stops:
        cut = make_sequence(1, unit * 6, 20, temperature=0.0, logit_bias=loop.sampling.logit_bias, stop=(stop,))
        told = said(runner, tokenizer, LIMITS, Speculation(Fixed(7)), [cut])[0][1, 0]
        assert (told.text, told.end) == (whole.text[: whole.text.index(stop)], "stop")
    for limit in range(1, 12):
        short = make_sequence(1, unit * 6, limit, temperature=0.0, logit_bias=loop.sampling.logit_bias)
        told = said(runner, tokenizer, LIMITS, Speculation(Fixed(7)), [short])[0][1, 0]
        assert (told.ids, told.end) == (whole.ids[:limit], "length")


@pytest.mark.model
@pytest.mark.timeout(900)
def test_the_real_model_says_the_same_with_guesses_in_fewer_steps() -> None:
    model_dir = prepare(cache_dir(), print)
    tokenizer = Tokenizer.load(model_dir)
    limits = Limits(slots=4, context_tokens=256, kv_tokens=4 * 256, chunk_tokens=128, step_tokens=128)
    runner = load_runner(model_dir, slots=limits.slots, context_tokens=limits.context_tokens, threads=2)
    lines = "The cat sat. The dog ran. The cat sat. The dog ran. The cat sat. The dog"
    sequences = [
        make_sequence(1, tokenizer.encode_text(lines), 24, temperature=0.0, logprobs=1),
        make_sequence(2, tokenizer.encode_text("1 2 3 4 1 2 3 4 1 2 3 4 1 2"), 24, seed=5, temperature=0.4),
        make_sequence(3, tokenizer.encode_text("안녕 🌾 안녕 🌾 안녕 🌾 안녕"), 24, seed=6, top_p=0.9),
    ]
    plain, steps = said(runner, tokenizer, limits, Speculation(Fixed(0)), sequences)
    assert said(runner, tokenizer, limits, Speculation(Fixed(7)), sequences)[0] == plain
    assert said(runner, tokenizer, limits, Speculation(Fixed(7)), sequences[:1])[1] < steps
