"""One choice as its tokens come: where it ends, what it is called, and text that joins whatever is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_world import make_sequence, write_tokenizer

from wire.messages import Logprob
from workers.engine.generation import Generation, joined, open_generations
from workers.engine.protocol import Emission, Restored
from workers.engine.tokenizer import Tokenizer

END = 2
"""<|im_end|>, which the tiny tokenizer's config.json names as the end"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    (directory / "config.json").write_text('{"eos_token_id": 2}')
    return Tokenizer.load(directory)


def told(tokenizer: Tokenizer, tokens: list[int], **changes: object) -> list[Emission]:
    """What a choice says that gets these tokens, up to its end."""
    generation = Generation(make_sequence(**changes), 0, tokenizer)  # type: ignore[arg-type]
    said: list[Emission] = []
    for token in tokens:
        said.append(generation.take(token, Logprob(-1.0)))
        if said[-1].end is not None:
            break
    return said


def test_one_token_is_one_token_and_a_length(tokenizer: Tokenizer) -> None:
    (only,) = told(tokenizer, [70], max_tokens=1)
    assert (only.ids, only.text, only.end) == ((70,), "C", "length")


def test_an_ending_token_is_a_stop_on_the_last_allowed_place_too_and_never_shows(tokenizer: Tokenizer) -> None:
    *before, last = told(tokenizer, [70, 71, END], max_tokens=3)
    assert [emission.end for emission in before] == [None, None]
    assert (last.ids, last.text, last.end, last.first) == ((), "", "stop", 2)
    first = told(tokenizer, [END], max_tokens=1)[0]
    assert (first.ids, first.text, first.end, first.first) == ((), "", "stop", 0)


def test_a_control_token_that_ends_nothing_shows_nothing(tokenizer: Tokenizer) -> None:
    assert "".join(emission.text for emission in told(tokenizer, [70, 1, 0, 71])) == "CD"


@pytest.mark.parametrize("text", ["🌾 안녕하세요 👩‍👩‍👧!", "가나다", "é🎉"])
def test_joined_deltas_are_the_whole_text_wherever_max_tokens_cuts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_plain(text)
    for limit in range(1, len(ids) + 1):
        said = told(tokenizer, ids, max_tokens=limit)
        whole = tokenizer.render_text(ids[:limit], (), "length")
        assert "".join(emission.text for emission in said) == whole
        assert (said[-1].end, sum(len(emission.ids) for emission in said)) == ("length", limit)
        assert all("\ufffd" not in emission.text for emission in said[:-1])
    assert whole == text


def test_a_stop_over_several_tokens_ends_the_text_before_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain("one two three")
    said = told(tokenizer, ids, max_tokens=99, stop=(" two t",))
    assert ("".join(emission.text for emission in said), said[-1].end) == ("one", "stop")
    assert sum(len(emission.ids) for emission in said) == len(tokenizer.encode_plain("one two t"))


def test_only_a_real_prefix_of_a_stop_is_held_back(tokenizer: Tokenizer) -> None:
    said = told(tokenizer, tokenizer.encode_plain("axbxyz"), max_tokens=99, stop=("xyzzy",))
    assert [emission.text for emission in said] == ["a", "", "xb", "", "", ""]
    cut = told(tokenizer, tokenizer.encode_plain("axy"), max_tokens=3, stop=("xyzzy",))
    assert [emission.text for emission in cut] == ["a", "", "xy"]


def test_emissions_that_follow_each_other_join(tokenizer: Tokenizer) -> None:
    first, second, third = told(tokenizer, tokenizer.encode_plain("abc"), max_tokens=3, logprobs=0)
    whole = joined(joined(first, second), third)
    assert (whole.first, whole.ids, whole.text, whole.end) == (
        0,
        (*first.ids, *second.ids, *third.ids),
        "abc",
        "length",
    )
    assert whole.logprobs == (Logprob(-1.0),) * 3
    failed = joined(first, Generation(make_sequence(), 0, tokenizer).fail("no"))
    assert (failed.ids, failed.error) == (first.ids, "no")


def test_how_likely_the_prompt_was_is_told_once_by_the_first_choice(tokenizer: Tokenizer) -> None:
    sequence = make_sequence(prompt=(40, 50, 60), n=2, prompt_logprobs=0)
    first, second = open_generations(sequence, tokenizer)
    assert (first.scores_prompt, second.scores_prompt) == (True, False)
    first.score(0, [Logprob(-9.0)])
    first.score(0, [Logprob(-1.0)])  # computed again from its beginning
    first.score(1, [Logprob(-2.0)])
    said = first.take(70, None).prompt
    assert said is not None
    assert (said.ids, said.logprobs) == ((40, 50, 60), (Logprob(-1.0), Logprob(-2.0)))
    assert first.take(70, None).prompt is None
    assert second.take(70, None).prompt is None
    again = make_sequence(prompt=(40, 50, 60), n=2, prompt_logprobs=0, restored=(Restored((70,)), Restored(())))
    assert not any(generation.scores_prompt for generation in open_generations(again, tokenizer))
