"""Whatever is lost, doubled, delayed or said by a former owner: a client gets each token once, in order (R7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingress.stream import Broken, Gap, Stream
from wire.fleet import Fleet
from wire.messages import Accepted, ChoiceEnd, Delta, End, Entry, Refused

FLEET = Fleet("local", "cpu", "m", "1", "sim")


def accepted(epoch: int = 1, attempt: int = 1, **fields: Any) -> Accepted:
    known: dict[str, Any] = {
        "request_id": "r",
        "attempt": attempt,
        "epoch": epoch,
        "fleet": FLEET,
        "shard": 0,
        "ref": 2,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "fingerprint": "fp",
    }
    return Accepted(**{**known, **fields})


def delta(first: int, ids: tuple[int, ...], text: str | None = None, **fields: Any) -> Delta:
    known: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "epoch": 1,
        "choice": 0,
        "first": first,
        "ids": ids,
        "text": "".join(f"<{i}>" for i in ids) if text is None else text,
    }
    return Delta(**{**known, **fields})


def end(tokens: tuple[int, ...], ends: tuple[ChoiceEnd | None, ...] | None = None, **fields: Any) -> End:
    known: dict[str, Any] = {
        "request_id": "r",
        "attempt": 1,
        "epoch": 1,
        "reason": "stop",
        "ends": ("stop",) * len(tokens) if ends is None else ends,
        "tokens": tokens,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "completion_tokens": sum(tokens),
    }
    return End(**{**known, **fields})


def refused(**fields: Any) -> Refused:
    known: dict[str, Any] = {"request_id": "r", "attempt": 1, "epoch": 1, "status": 503, "code": None, "message": "m"}
    return Refused(**{**known, **fields})


def opened(n: int = 1) -> Stream:
    stream = Stream(n)
    stream.begin(1)
    assert stream.apply(accepted()) == accepted()
    return stream


def test_what_continues_exactly_is_delivered_as_it_came() -> None:
    stream = opened()
    for entry in (delta(0, (1, 2)), delta(2, (3,)), delta(3, (), "tail", end="stop"), end((3,))):
        assert stream.apply(entry) == entry
    assert stream.ended


def test_a_frame_that_comes_twice_is_delivered_once() -> None:
    stream = opened()
    for entry in (delta(0, (1, 2)), delta(2, (3,)), delta(3, (), "tail", end="stop")):
        assert stream.apply(entry) == entry
        assert stream.apply(entry) is None
    assert stream.apply(delta(0, (1, 2))) is None


def test_a_gap_asks_and_the_whole_fills_it() -> None:
    stream = opened()
    stream.apply(delta(0, (1,)))
    assert stream.apply(delta(2, (3,))) == Gap()
    assert stream.apply(delta(0, (1, 2, 3), end="stop")) == delta(1, (2, 3), end="stop")
    assert stream.apply(end((3,))) == end((3,))


def test_logprobs_of_what_was_delivered_are_cut_too() -> None:
    stream = opened()
    stream.apply(delta(0, (1,), logprobs=("a",)))
    assert stream.apply(delta(0, (1, 2), logprobs=("a", "b"))) == delta(1, (2,), logprobs=("b",))


def test_tokens_before_accepted_are_a_gap_because_the_status_line_needs_it() -> None:
    stream = Stream(1)
    stream.begin(1)
    assert stream.apply(delta(0, (1,))) == Gap()
    assert stream.apply(end((1,))) == Gap()


def test_a_new_owner_must_show_what_it_knows_before_it_goes_on() -> None:
    stream = opened()
    stream.apply(delta(0, (1, 2)))
    assert stream.apply(delta(2, (3,), epoch=9)) == Gap()
    assert stream.apply(end((2,), epoch=9)) == Gap()
    assert stream.apply(delta(0, (1, 2), epoch=9)) is None
    assert stream.apply(delta(2, (3,), epoch=9)) == delta(2, (3,), epoch=9)


def test_a_former_owner_is_not_heard_any_more() -> None:
    stream = opened()
    stream.apply(delta(0, (1,), epoch=9))
    assert stream.apply(delta(1, (2,), epoch=1)) is None
    assert stream.apply(end((1,), epoch=1)) is None


def test_an_earlier_attempt_is_not_heard_any_more() -> None:
    stream = Stream(1)
    stream.begin(1)
    stream.begin(2)
    assert stream.apply(accepted(attempt=1, epoch=99)) is None
    assert stream.apply(accepted(attempt=2)) is not None


def test_an_accepted_request_does_not_move() -> None:
    with pytest.raises(ValueError, match="doesn't move"):
        opened().begin(2)


@pytest.mark.parametrize(
    "entry",
    [
        delta(0, (1, 9), epoch=2),
        delta(0, (1, 2), "<1>other", epoch=2),
        delta(0, (1,), "other", epoch=2),
        delta(0, (1, 2, 3), "<1>", epoch=2),
        delta(1, (9,)),
        delta(0, (1,), choice=1),
        end((1,)),
        end((2, 2)),
        refused(),
        accepted(epoch=2, prompt_tokens=6),
        accepted(epoch=2, fingerprint="other"),
    ],
)
def test_what_contradicts_what_was_delivered_breaks_the_stream(entry: Entry) -> None:
    stream = opened()
    stream.apply(delta(0, (1, 2)))
    assert isinstance(stream.apply(entry), Broken)


@pytest.mark.parametrize(
    "entry", [delta(3, (4,)), delta(0, (1, 2, 3), end="length"), delta(0, (1, 2, 3)), end((2,), ("length",))]
)
def test_nothing_follows_a_choices_end(entry: Entry) -> None:
    stream = opened()
    stream.apply(delta(0, (1, 2), end="stop"))
    assert isinstance(stream.apply(entry), Broken)


def test_an_end_waits_for_the_deltas_it_names() -> None:
    stream = opened(2)
    stream.apply(delta(0, (1,), end="stop"))
    assert stream.apply(end((1, 1))) == Gap()
    stream.apply(delta(0, (1,), choice=1))
    assert stream.apply(end((1, 1))) == Gap(), "choice 1 ended, but the text its end released has not come"
    assert stream.apply(end((1, 1), ("stop", None), reason="timeout")) is not None


def test_a_refusal_or_an_expiry_needs_no_accepted() -> None:
    for entry in (refused(), end((0,), (None,), reason="expired")):
        stream = Stream(1)
        stream.begin(1)
        assert stream.apply(entry) == entry


@dataclass
class Owners:
    """What owners, one after another, say of one request: entries that a log would hold."""

    n: int
    truth: list[list[int]]
    log: list[Entry]


@st.composite
def owners(draw: st.DrawFn) -> Owners:
    """A truth of n choices, told in steps of any size by one to three owners, each repeating all first."""
    n = draw(st.integers(1, 3))
    truth = [draw(st.lists(st.integers(0, 3), max_size=12)) for _ in range(n)]
    told = [0] * n
    log: list[Entry] = [accepted(epoch=1)]
    epochs = draw(st.integers(1, 3))
    for epoch in range(1, epochs + 1):
        if epoch > 1:
            log.append(accepted(epoch=epoch))
            log += [delta(0, tuple(truth[k][: told[k]]), choice=k, epoch=epoch) for k in range(n) if told[k]]
        for _ in range(draw(st.integers(0, 6))):
            k = draw(st.integers(0, n - 1))
            size = draw(st.integers(0, 3))
            ids = tuple(truth[k][told[k] : told[k] + size])
            if ids:
                log.append(delta(told[k], ids, choice=k, epoch=epoch))
                told[k] += len(ids)
    return Owners(n, truth, log)


def whole(owners: Owners, epoch: int) -> list[Entry]:
    """An answer to an Attach once all is done."""
    return [
        accepted(epoch=epoch),
        *(delta(0, tuple(ids), choice=k, epoch=epoch, end="stop") for k, ids in enumerate(owners.truth)),
        end(tuple(map(len, owners.truth)), epoch=epoch),
    ]


class Client:
    """Keeps what was delivered, and holds every delivery against the rule."""

    def __init__(self, n: int) -> None:
        self.stream = Stream(n)
        self.stream.begin(1)
        self.ids: list[list[int]] = [[] for _ in range(n)]
        self.text = [""] * n
        self.ended = False

    def hear(self, entry: Entry) -> None:
        event = self.stream.apply(entry)
        assert not isinstance(event, Broken), (event, entry)
        if isinstance(event, Delta):
            assert event.first == len(self.ids[event.choice]), "in order, without a hole"
            self.ids[event.choice] += event.ids
            self.text[event.choice] += event.text
        self.ended |= isinstance(event, End)


@given(owners(), st.data())
@settings(max_examples=300)
def test_any_loss_doubling_and_disorder_delivers_a_prefix_and_an_attach_the_rest(
    told: Owners, data: st.DataObject
) -> None:
    indexes = st.lists(st.integers(0, len(told.log) - 1), max_size=2 * len(told.log))
    client = Client(told.n)
    for index in data.draw(indexes):
        client.hear(told.log[index])
        for got, true in zip(client.ids, told.truth, strict=True):
            assert got == true[: len(got)]
    for entry in whole(told, epoch=4):
        client.hear(entry)
    assert client.ids == told.truth
    assert client.text == ["".join(f"<{i}>" for i in ids) for ids in told.truth]
    assert client.ended


@given(owners(), st.data())
@settings(max_examples=200)
def test_an_owner_that_lies_never_makes_a_client_see_two_truths(told: Owners, data: st.DataObject) -> None:
    """A second truth under a new epoch: what was delivered stays a prefix of one consistent answer per epoch."""
    client = Client(told.n)
    for entry in told.log:
        client.hear(entry)
    before = [list(ids) for ids in client.ids]
    lie = tuple(data.draw(st.lists(st.integers(0, 3), max_size=14)))
    event = client.stream.apply(delta(0, lie, epoch=8))
    seen = tuple(before[0])
    if lie[: len(seen)] == seen:
        assert not isinstance(event, Broken)
    elif seen[: len(lie)] != lie:
        assert isinstance(event, Broken)
