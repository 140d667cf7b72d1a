"""Keyed draws and the sampler: a token depends on its logits, its past and (seed, choice, position) alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from engine_world import make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.engine import draws
from workers.engine.drawing import Drawn, Sampler, Uniform
from workers.engine.draws import philox, uniform
from workers.engine.errors import SamplingFailed
from workers.engine.generation import Generation
from workers.engine.native.build import kernels
from workers.engine.native.sampler import NativeSampler
from workers.engine.plain_sampler import PlainSampler
from workers.engine.protocol import Restored
from workers.engine.simulated_vocabulary import SimulatedVocabulary

NO_EOS: frozenset[int] = frozenset()
Make = Callable[..., Sampler]
"""(ids that end, and maybe where draws come from) → a sampler"""


def native(eos_ids: frozenset[int], uniform: Uniform | None = None) -> Sampler:
    library = kernels()
    assert library is not None
    return NativeSampler(library, eos_ids, uniform)


def plain(eos_ids: frozenset[int], uniform: Uniform = draws.uniform) -> Sampler:
    return PlainSampler(eos_ids, uniform)


@pytest.fixture(params=["native", "plain"], scope="module")
def make(request: pytest.FixtureRequest) -> Make:
    """The same is asked of both samplers."""
    if request.param == "plain":
        return plain
    if kernels() is None:
        pytest.skip("no C++ compiler or no AVX2 here")
    return native


def drawn_by(sampler: Sampler, logits: np.ndarray, generation: Generation) -> Drawn:
    """The next token of one choice."""
    (drawn,) = sampler.draw(logits[None], [(0, generation)])
    assert not isinstance(drawn, SamplingFailed)
    return drawn


def drawn_at(make: Make, scores: np.ndarray, drawn: float, **changes: object) -> int:
    """The token where a draw falls."""
    return drawn_by(make(NO_EOS, lambda *_: drawn), scores.astype(np.float32), generation(**changes))[0]


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def generation(ids: tuple[int, ...] = (), **changes: object) -> Generation:
    prompt = changes.pop("prompt", (2,))
    sequence = make_sequence(prompt=prompt, max_tokens=99, restored=(Restored(ids),), **changes)  # type: ignore[arg-type]
    return Generation(sequence, 0, SimulatedVocabulary())


@given(
    st.tuples(*[st.integers(0, 2**64 - 1)] * 2),
    st.tuples(*[st.integers(0, 2**64 - 1)] * 3),
    st.integers(0, 2**63),
)
def test_philox_is_numpys(key: tuple[int, int], high: tuple[int, int, int], low: int) -> None:
    theirs = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=np.array((low, *high), dtype=np.uint64))
    assert philox(key, (low + 1, *high)) == tuple(int(word) for word in theirs.random_raw(4))  # it counts, then draws


def test_philox_of_zeros_is_the_papers() -> None:
    assert philox((0, 0), (0, 0, 0, 0))[0] == 0x16554D9ECA36314C


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 127), st.integers(0, 10**6))
def test_any_seed_gives_a_number_below_one_and_always_the_same(seed: int, choice: int, position: int) -> None:
    drawn = uniform(seed, choice, position)
    assert 0 <= drawn < 1
    assert uniform(seed, choice, position) == drawn


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 127), st.integers(0, 10**6))
def test_the_kernels_draw_the_same_number(seed: int, choice: int, position: int) -> None:
    if (library := kernels()) is None:
        pytest.skip("no C++ compiler or no AVX2 here")
    words = seed & (2**64 - 1), (seed >> 64) & (2**64 - 1)
    assert library.millstream_uniform(*words, choice, position) == uniform(seed, choice, position)


@pytest.mark.parametrize("seed", [0, 5, -1, 2**64 - 1])
def test_the_kernels_draw_by_seed_choice_and_position(seed: int) -> None:
    if kernels() is None:
        pytest.skip("no C++ compiler or no AVX2 here")
    logits = np.zeros((1, 4096), np.float32)
    for count in range(20):
        asked = [(0, generation(tuple(range(count)), seed=seed))]
        assert native(NO_EOS).draw(logits, asked) == native(NO_EOS, uniform).draw(logits, asked)


def test_seed_choice_and_position_all_count() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0), (2**64 - 1, 0, 0), (-(2**63), 0, 0), (2**63, 0, 0)]
    assert len({uniform(*key) for key in keys}) == len(keys)


def test_temperature_zero_takes_the_first_of_the_likeliest(make: Make) -> None:
    assert drawn_by(make(NO_EOS), logits_of(1, 3, 3), generation(temperature=0.0)) == (1, None)


def test_a_draw_falls_into_a_tokens_share(make: Make) -> None:
    scores = np.log(np.array([0.5, 0.25, 0.25]))
    drawn = (0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53)
    assert [drawn_at(make, scores, each) for each in drawn] == [0, 0, 1, 1, 2, 2]


@given(st.integers(1, 2000), st.integers(0, 10**6), st.floats(0, 1, exclude_max=True), st.floats(0, 1))
def test_a_draw_is_the_inverse_of_the_distribution(make: Make, size: int, seed: int, drawn: float, none: float) -> None:
    random = np.random.default_rng(seed)
    probabilities = random.random(size) * (random.random(size) > none)
    probabilities[random.integers(size)] = 1
    scores = np.log(probabilities, out=np.full(size, -np.inf), where=probabilities > 0)
    token = drawn_at(make, scores, drawn)
    assert probabilities[token] > 0
    reached = np.cumsum(probabilities) / probabilities.sum()
    assert reached[token] - probabilities[token] / probabilities.sum() - 1e-6 <= drawn <= reached[token] + 1e-6


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),  # 0.5 + 0.25 of 0.875 = 0.857
        ({"temperature": 1e-300}, {0}),
    ],
)
def test_what_the_limits_keep(make: Make, changes: dict[str, float], kept: set[int]) -> None:
    scores = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    drawn = {drawn_at(make, scores, number / 1000, **changes) for number in range(1000)}
    assert drawn == kept or (changes.get("top_k") == 3 and drawn == kept | {2, 3})  # equals of the third stay


def test_equals_of_the_last_kept_stay(make: Make) -> None:
    scores = np.log(np.array([0.4, 0.3, 0.3]))
    assert {drawn_at(make, scores, n / 100, top_k=2) for n in range(100)} == {0, 1, 2}


def test_penalties_follow_their_definitions(make: Make) -> None:
    logits = logits_of(1.0, 1.2, -1.0)
    past = (1, 1)
    assert drawn_by(make(NO_EOS), logits, generation(past, temperature=0.0))[0] == 1
    # 1.2 - 0.3 = 0.9 < 1
    assert drawn_by(make(NO_EOS), logits, generation(past, temperature=0.0, presence_penalty=0.3))[0] == 0
    # 1.2 - 2 * 0.15 = 0.9 < 1
    assert drawn_by(make(NO_EOS), logits, generation(past, temperature=0.0, frequency_penalty=0.15))[0] == 0
    # 1.2 / 1.5 = 0.8 < 1; the prompt counts too, for this one
    assert drawn_by(make(NO_EOS), logits, generation(past, temperature=0.0, repetition_penalty=1.5))[0] == 0
    seen = {"prompt": (0, 1), "temperature": 0.0, "repetition_penalty": 2.5}
    assert drawn_by(make(NO_EOS), logits_of(1.0, 1.2, 0.41), generation(**seen))[0] == 1
    assert drawn_by(make(NO_EOS), logits_of(1.0, 1.2, 0.49), generation(**seen))[0] == 2


def test_a_bias_moves_a_token(make: Make) -> None:
    assert drawn_by(make(NO_EOS), logits_of(0, 0, 0), generation(temperature=0.0, logit_bias={"2": 5.0}))[0] == 2
    assert drawn_by(make(NO_EOS), logits_of(9, 0, 0), generation(temperature=0.0, logit_bias={"0": -100.0}))[0] == 1


def test_an_ending_waits_for_min_tokens_and_never_comes_when_ignored(make: Make) -> None:
    logits, eos = logits_of(0, 9), frozenset((1,))
    assert drawn_by(make(eos), logits, generation(temperature=0.0))[0] == 1
    assert drawn_by(make(eos), logits, generation(temperature=0.0, min_tokens=1))[0] == 0
    assert drawn_by(make(eos), logits, generation((0,), temperature=0.0, min_tokens=1))[0] == 1
    assert drawn_by(make(eos), logits, generation((0,), temperature=0.0, ignore_eos=True))[0] == 0


def test_logprobs_are_the_models_own_and_ordered(make: Make) -> None:
    logits = np.log(np.array([0.125, 0.5, 0.125, 0.25])).astype(np.float32)
    (shown,) = make(NO_EOS).score(logits[None], [0], 4)
    assert shown.logprob == pytest.approx(math.log(0.125))
    assert [token for token, _ in shown.top] == [1, 3, 0, 2]
    assert [value for _, value in shown.top] == pytest.approx([math.log(p) for p in (0.5, 0.25, 0.125, 0.125)])
    assert make(NO_EOS).score(logits[None], [0], 0)[0].top == ()
    # temperature, bias and limits don't show in them
    token, logprob = drawn_by(make(NO_EOS), logits, generation(temperature=0.0, logprobs=2, logit_bias={"0": 50.0}))
    assert token == 0
    assert logprob is not None
    assert logprob.logprob == pytest.approx(math.log(0.125))
    assert [other for other, _ in logprob.top] == [1, 3]


def test_numbers_that_are_none_fail_the_request(make: Make) -> None:
    rows = np.array([[1, math.nan], [0, 1], [1, math.inf]], dtype=np.float32)
    asks = [(row, generation(temperature=0.0)) for row in (0, 1, 2)]
    first, second, third = make(NO_EOS).draw(rows, asks)
    assert isinstance(first, SamplingFailed)
    assert second == (1, None)
    assert isinstance(third, SamplingFailed)
    with pytest.raises(SamplingFailed):
        make(NO_EOS).score(rows, [0, 0, 0], 0)


def test_a_bias_past_what_floats_hold_fails_or_draws_but_ends_nothing() -> None:
    if kernels() is None:
        pytest.skip("no C++ compiler or no AVX2 here")
    logits = np.array([[0.0, -math.inf, 1.0, 2.0]], np.float32)
    for bias in (1e300, -1e300):
        asked = generation(top_k=3, top_p=0.9, logprobs=4, logit_bias={"0": bias, "1": bias})
        (drawn,) = native(NO_EOS).draw(logits, [(0, asked)])
        assert isinstance(drawn, SamplingFailed) == (bias > 0)


def test_which_sampler_drew_shows_in_the_fingerprint() -> None:
    if kernels() is None:
        pytest.skip("no C++ compiler or no AVX2 here")
    assert native(NO_EOS).fingerprint != plain(NO_EOS).fingerprint


KINDS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"logprobs": 0},
    {"temperature": 0.7, "logprobs": 2, "top_p": 0.9},
    {"top_k": 40, "frequency_penalty": 0.5},
    {"min_p": 0.05, "temperature": 1.3},
    {"logit_bias": {"7": 3.0}, "top_p": 0.99, "logprobs": 1},
    {},
)


@pytest.mark.parametrize("vocab", [272, 4096, 49_152, 5_003])
def test_a_row_gives_the_same_alone_and_among_others_on_any_number_of_threads(make: Make, vocab: int) -> None:
    logits = (np.random.default_rng(vocab).standard_normal((41, vocab)) * 4).astype(np.float32)
    asks = [(row, generation((9, 7, 7), seed=row, **KINDS[row % len(KINDS)])) for row in range(41)]
    eos = frozenset((2,))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [make(eos).draw(logits[row : row + 1], [(0, asked)])[0] for row, asked in asks]
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert make(eos).draw(logits, asks) == alone
            assert make(eos).draw(logits, asks[::-1]) == alone[::-1]
    finally:
        torch.set_num_threads(threads)


@given(
    st.integers(0, 10**6), st.integers(1, 60), st.floats(0.01, 1), st.floats(0, 0.5), st.floats(0, 1, exclude_max=True)
)
@settings(deadline=None)
def test_limits_keep_what_their_definitions_keep(
    make: Make, seed: int, top_k: int, top_p: float, min_p: float, drawn: float
) -> None:
    scores = (np.random.default_rng(seed).standard_normal(700) * 3).astype(np.float32)
    shares = np.exp(scores.astype(np.float64))
    order = np.argsort(-shares, kind="stable")[:top_k]
    held = np.cumsum(shares[order]) / shares[order].sum()
    kept = order[: int(np.searchsorted(held, top_p)) + 1]
    kept = np.sort(kept[shares[kept] >= min_p * shares.max()])
    reached = np.cumsum(shares[kept]) / shares[kept].sum()
    at = drawn_at(make, scores, drawn, top_k=top_k, top_p=top_p, min_p=min_p)
    assert at in kept
    where = int(np.flatnonzero(kept == at)[0])
    assert (reached[where - 1] if where else 0) - 1e-6 <= drawn <= reached[where] + 1e-6


class Fixed:
    """A grammar that always allows the same."""

    ended = False

    def __init__(self, mask: bytes) -> None:
        self._mask = mask

    def allowed(self) -> bytes:
        return self._mask


@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from((272, 700, 4096, 5003)),
    spread=st.sampled_from((0.1, 1.0, 4.0)),
    past=st.lists(st.integers(0, 271), max_size=20),
    allowed=st.sampled_from((None, 0.0, 0.01, 0.9)),
    drawn=st.floats(0, 1, exclude_max=True),
    sampling=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from((0.0, 0.3, 0.8, 1.7)),
            "top_k": st.integers(1, 400),
            "top_p": st.floats(0.01, 0.999),
            "min_p": st.floats(0.001, 0.9),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "repetition_penalty": st.floats(0.5, 2),
            "logit_bias": st.dictionaries(st.integers(0, 271).map(str), st.floats(-100, 100), max_size=4),
            "logprobs": st.integers(0, 20),
            "ignore_eos": st.booleans(),
        },
    ),
)
@settings(deadline=None)
def test_both_samplers_draw_the_same_but_at_borders(
    seed: int,
    vocab: int,
    spread: float,
    past: list[int],
    allowed: float | None,
    drawn: float,
    sampling: dict[str, object],
) -> None:
    if kernels() is None:
        pytest.skip("no C++ compiler or no AVX2 here")
    random = np.random.default_rng(seed)
    logits = (random.standard_normal(vocab) * spread).astype(np.float32)
    asked = generation(tuple(past), prompt=(5, 9, 5), **sampling)
    if allowed is not None:
        asked.matcher = Fixed(np.packbits(random.random(vocab) < allowed, bitorder="little").tobytes())  # type: ignore[assignment]
    eos = frozenset((2, 7))
    token, logprob = drawn_by(native(eos, lambda *_: drawn), logits, asked)
    near = [drawn_by(plain(eos, lambda *_, at=at: at), logits, asked) for at in (drawn, drawn - 1e-6, drawn + 1e-6)]
    assert token in [other for other, _ in near]
    (other,) = plain(eos).score(logits[None], [token], sampling.get("logprobs", 0))  # type: ignore[arg-type]
    if logprob is not None:
        assert logprob.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [shown for shown, _ in logprob.top] == [shown for shown, _ in other.top]
        assert [value for _, value in logprob.top] == pytest.approx([value for _, value in other.top], abs=1e-5)
