"""The text machine: whatever the cuts, the pieces join to the text; never half a character, nothing of a stop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.text import TextStream

BYTES = [bytes([value]) for value in range(256)]
PIECES = [*BYTES, *(text.encode() for text in ("hello", " wor", "ld", "안녕", "하세요", "👩‍👩‍👧", "\n\n", "ab", "aab"))]
TEXTS = st.text(alphabet="ab\n안녕🌾é ", max_size=30)


def token_bytes(token: int) -> bytes:
    return PIECES[token]


def spelled(text: str) -> list[int]:
    """A text as single bytes: every character beyond ASCII is split."""
    return list(text.encode())


@st.composite
def ids_of_text(draw: st.DrawFn) -> list[int]:
    """Ids that mostly spell text, with stray bytes among them."""
    parts = draw(st.lists(st.one_of(TEXTS.map(spelled), st.lists(st.integers(0, len(PIECES) - 1), max_size=4))))
    return [token for part in parts for token in part]


def expected(ids: list[int], stops: list[str]) -> str:
    """The definition: the whole text, cut before the stop that is complete first; of two at once the longer."""
    text = b"".join(map(token_bytes, ids)).decode("utf-8", "replace")
    ends = [(text.index(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text
    end, length = min(ends)
    return text[: end + length]


@given(ids_of_text(), st.lists(st.text(alphabet="ab\n안🌾", min_size=1, max_size=5), max_size=4), st.data())
def test_joined_pieces_are_the_text_before_the_first_stop(
    ids: list[int], stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    stream = TextStream(token_bytes, stops)
    pieces = [stream.push(ids[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces.append(stream.finish())
    assert "".join(pieces) == expected(ids, stops)


@given(ids_of_text(), st.lists(st.text(alphabet="ab\n안🌾", min_size=1, max_size=5), max_size=4), st.data())
def test_after_a_resume_the_rest_of_the_text_follows(ids: list[int], stops: list[str], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    before = TextStream(token_bytes, stops)
    sent = before.push(ids[:cut])
    after = TextStream(token_bytes, stops)
    assert after.push(ids[:cut]) == sent
    assert sent + after.push(ids[cut:]) + after.finish() == expected(ids, stops)


@given(TEXTS)
def test_a_character_comes_whole(text: str) -> None:
    stream = TextStream(token_bytes)
    pieces = [stream.push([token]) for token in spelled(text)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_half_a_character_at_the_end_shows_as_a_replacement() -> None:
    stream = TextStream(token_bytes)
    assert stream.push(list("안".encode()[:2])) == ""
    assert stream.finish() == "\ufffd"


def test_only_a_real_prefix_of_a_stop_is_held_back() -> None:
    stream = TextStream(token_bytes, ["abc"])
    assert stream.push(spelled("xab")) == "x"
    assert stream.push(spelled("d")) == "abd"
    assert stream.push(spelled("ab")) == ""
    assert stream.push(spelled("c never seen")) == ""
    assert stream.stopped
    assert stream.finish() == ""


def test_a_stop_over_several_tokens_that_repeats_itself_is_found() -> None:
    stream = TextStream(token_bytes, ["aab"])
    assert stream.push(spelled("aaa")) == "a"
    assert stream.push(spelled("b")) == ""
    assert stream.stopped


@pytest.mark.parametrize(
    ("stops", "text", "left"),
    [
        (["bc", "abcd"], "xabcd", "xa"),  # complete first, though it begins later
        (["bc", "abc"], "xabc", "x"),  # both at once: the longer
        (["", "b"], "ab", "a"),  # an empty stop is none
    ],
)
def test_which_stop_wins(stops: list[str], text: str, left: str) -> None:
    stream = TextStream(token_bytes, stops)
    assert stream.push(spelled(text)) + stream.finish() == left


def test_a_long_text_that_nearly_stops_everywhere_is_no_work() -> None:
    stream = TextStream(token_bytes, ["a" * 5_000 + "b"])
    text = "a" * 50_000
    assert stream.push(spelled(text)) + stream.finish() == text


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'


def expected_with_calls(text: str, stops: list[str]) -> str:
    """The definition: stops end what comes before the first call."""
    before, opening, rest = text.partition("<tool_call>")
    cut = expected(spelled(before), stops)
    return cut if any(stop in before for stop in stops) else before + opening + rest


@given(
    st.lists(st.sampled_from(["a", "ab", "<", "<tool", "_call>", "안", CALL, "b\n"]), max_size=6).map("".join),
    st.lists(st.sampled_from(["a", "b", "<", "tool", "<tool_call>", "안a", "name", ">\n"]), max_size=3),
    st.data(),
)
def test_stops_end_text_and_not_calls(text: str, stops: list[str], data: st.DataObject) -> None:
    ids = spelled(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    stream = TextStream(token_bytes, stops, calls=True)
    pieces = [stream.push(ids[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces.append(stream.finish())
    assert "".join(pieces) == expected_with_calls(text, stops)
    assert stream.calling is ("<tool_call>" in text and not stream.stopped)


def test_only_a_real_prefix_of_a_call_is_held_back() -> None:
    stream = TextStream(token_bytes, ["x"], calls=True)
    assert stream.push(spelled("1 < 2 <tool")) == "1 < 2 "
    assert stream.push(spelled("s")) == "<tools"
    assert stream.push(spelled("<tool_call>{x")) == "<tool_call>{x"
    assert stream.finish() == ""


@given(
    ids_of_text(),
    st.lists(st.text(alphabet="ab\n안🌾", min_size=1, max_size=5), max_size=4),
    st.data(),
    st.integers(0, 12),
)
def test_no_stop_counts_in_the_text_of_the_first_ids(
    ids: list[int], stops: list[str], data: st.DataObject, unstopped: int
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    stream = TextStream(token_bytes, stops, unstopped=unstopped)
    pieces = [stream.push(ids[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces.append(stream.finish())
    free = TextStream(token_bytes).push(ids[:unstopped])
    whole = b"".join(map(token_bytes, ids)).decode("utf-8", "replace")
    ends = [(whole.index(stop, len(free)) + len(stop), -len(stop)) for stop in stops if stop in whole[len(free) :]]
    left = whole if not ends or len(ids) <= unstopped else whole[: sum(min(ends))]
    assert "".join(pieces) == left
