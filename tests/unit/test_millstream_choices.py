"""What `millstream choices` reads, and what it shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from routing_world import MODEL, NOW_MS, candidates, equal, signal
from test_routing_replay import BUSY, dispatch, told
from usages import usage

from millstream import choices, choices_text
from millstream.choices import Span, id_of, read
from millstream.errors import StackError
from routing.hindsight import hindsight
from routing.replay import Decision, Ended, Moment, Sent, replay
from wire.bus import Partition
from wire.clock import ManualClock
from wire.codec import encode
from wire.memory import MemoryBus
from wire.memory_log import MemoryLog
from wire.messages import Dispatches, Message, Snapshot, Usages
from wire.topics import SIGNALS, USAGE, WEIGHTS, all_topics, dispatches, weights_key

A, B = candidates(2)


class Region:
    """A log, written at the times that its clock shows."""

    def __init__(self) -> None:
        self.clock = ManualClock(NOW_MS)
        self.log = MemoryLog(self.clock)
        self.bus = MemoryBus(self.log)
        self.said: list[str] = []

    async def __aenter__(self) -> Region:
        await (await self.bus.admin()).create(all_topics([], [("local", 1)]))
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def write(self, after_ms: int, message: Message | bytes) -> None:
        """Append it, so long after the message before."""
        self.clock.advance(after_ms)
        value = message if isinstance(message, bytes) else encode(message)
        kinds: dict[type, str] = {Snapshot: WEIGHTS, Dispatches: dispatches("local"), Usages: USAGE}
        topic = kinds.get(type(message), SIGNALS)
        self.log.append(Partition(topic, 0), weights_key(MODEL, "local"), value)

    def send(self, after_ms: int, shard: int, name: str, **fields: Any) -> None:
        self.clock.advance(after_ms)
        one = dispatch(shard, name, at_ms=self.clock.now_ms() - 3, **fields)
        self.write(0, Dispatches(ingress="local/0", incarnation="i", at_ms=self.clock.now_ms(), sent=(one,)))

    async def read(self, from_ms: int, until_ms: int) -> list[Moment]:
        return await read(self.bus, "local", Span(from_ms=from_ms, until_ms=until_ms), self.said.append)


def versions(found: list[Moment]) -> list[int]:
    return [what.version for _, what in found if isinstance(what, Snapshot)]


def names(found: list[Moment]) -> list[str]:
    return [what.dispatch.request_id for _, what in found if isinstance(what, Sent)]


async def test_a_time_is_read_with_what_was_known_before_it_and_nothing_after() -> None:
    async with Region() as region:
        for version in (1, 2):
            region.write(0, msgspec.structs.replace(equal((A, B)), version=version))
        region.send(0, 0, "long ago")
        region.write(200_000, signal(0))
        region.send(1_000, 0, "before")
        region.send(30_000, 0, "wanted")
        region.write(0, Usages(entries=(usage("before"), usage("another"))))
        region.write(10, b"not a message")
        from_ms = region.clock.now_ms() - 1_000
        region.write(5_000, msgspec.structs.replace(equal((A, B)), version=3))
        region.send(500_000, 1, "after")
        found = await region.read(from_ms, region.clock.now_ms() - 400_000)
        assert versions(found) == [2, 3], "the latest before, and all since"
        assert names(found) == ["before", "wanted"]
        assert [what.name for _, what in found if isinstance(what, Ended)] == [("before", 1), ("another", 1)]
        assert [at_ms for at_ms, _ in found] == sorted(at_ms for at_ms, _ in found)
        whole = await region.read(NOW_MS, region.clock.now_ms() + 1)
        assert (versions(whole), names(whole)) == ([1, 2, 3], ["long ago", "before", "wanted", "after"])
        assert region.said == []


async def test_a_long_read_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "SAY_EVERY", 2)
    async with Region() as region:
        for _ in range(5):
            region.write(1, signal(0))
        await region.read(NOW_MS, region.clock.now_ms() + 1)
        assert region.said == ["2 records read", "4 records read"]


@pytest.mark.parametrize("name", ["ABC-1", "req_abc-1", "chatcmpl-abc-1", "cmpl-abc-1"])
def test_a_request_is_known_by_what_an_answer_calls_it(name: str) -> None:
    assert id_of(name) == "abc-1"


def decided(*whats: Any) -> list[Decision]:
    return list(replay(told(*whats), "local"))


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_choice_is_shown_with_all_that_there_was_to_choose_from() -> None:
    (one,) = decided(signal(0, **BUSY), signal(1), equal((A, B)), dispatch(0, "r", loss=0.25, cached_tokens=64))
    text = choices_text.decisions_text([one])
    assert f"r, attempt 1: {MODEL}, 100 prompt tokens, about 64 of them cached" in text
    assert "sent 2023-11-14 22:13:20.000 UTC by local/0 to local.gpu.org-model-1b.1.sim/0, after 0 ms" in text
    assert "reason loss, expected loss 0.2500, by snapshot 7" in text
    assert "it would go to local.gpu.org-model-1b.1.sim/1, by loss; regret " in text
    header, best, other = lines(text)[-3:]
    assert header == ["engine", "shard", "weight", "cached", "wait", "ms", "loss"]
    assert (best[0], best[2], best[-3:]) == ("gpu-1", "0.500", ["would", "be", "chosen"])
    assert (other[0], other[2], other[-1]) == ("gpu-0", "0.500", "chosen")
    assert float(best[5]) < float(other[5])


def test_attempts_stand_below_one_another_and_what_was_tried_is_marked() -> None:
    second = dispatch(1, "r", attempt=2, reason="backup", tried=((A.fleet, 0),))
    text = choices_text.decisions_text(decided(signal(0), signal(1), equal((A, B)), dispatch(0, "r"), second))
    assert text.index("attempt 1") < text.index("attempt 2")
    assert lines(text)[-1][0] == "gpu-0"
    assert lines(text)[-1][-2:] == ["not", "able"]
    assert lines(text)[-2][-1] == "chosen"


def test_what_was_not_known_is_said() -> None:
    (blind,) = decided(dispatch(0, "r", reason="hashed", snapshot_version=None))
    text = choices_text.decisions_text([blind])
    assert "without a snapshot" in text
    assert text.endswith("nothing was known of any engine, so there is nothing to compare")
    (unknown,) = decided(signal(0), equal((A,)), dispatch(5, "r", snapshot_version=3))
    text = choices_text.decisions_text([unknown])
    assert "by snapshot 3, which isn't in the log any more" in text
    assert "nothing was known of that shard" in text
    plain = json.loads(choices_text.decisions_json([blind, unknown]))
    assert [(one["again"], one["alike"], one["regret"], one["why"]) for one in plain] == [
        (None, None, None, None),
        ("local.gpu.org-model-1b.1.sim/0", False, None, None),
    ]


def test_why_a_snapshot_was_as_it_was_is_shown() -> None:
    why = msgspec.structs.replace(equal((A, B)), why="both serve")
    (one,) = decided(signal(0), signal(1), why, dispatch(0, "r"))
    assert "by snapshot 7: both serve" in choices_text.decisions_text([one])
    (plain,) = json.loads(choices_text.decisions_json([one]))
    assert (plain["why"], plain["request_id"], plain["shard"]) == ("both serve", "r", "local.gpu.org-model-1b.1.sim/0")
    assert [(each["engine"], each["chosen"], each["able"]) for each in plain["candidates"]] == [
        ("gpu-0", True, True),
        ("gpu-1", False, True),
    ]


def test_many_choices_are_a_row_a_model_and_the_worst_is_named() -> None:
    whats = (signal(0, **BUSY), signal(1), equal((A, B)))
    found = hindsight(decided(*whats, dispatch(1, "good", cached_tokens=50), dispatch(0, "bad", reason="weight")))
    text = choices_text.summary_text(found, 300)
    header, row = lines(text)[2:4]
    assert header[:7] == ["model", "choices", "alike", "regret", "p99", "worst", "swing"]
    assert row[:3] == [MODEL, "2", "50.0%"]
    assert row[6:] == ["-", "25.0%", "loss", "1,", "weight", "1"]
    assert "`millstream choices bad` shows why" in text
    (plain,) = json.loads(choices_text.summary_json(found))
    assert (plain["decisions"], plain["reasons"], plain["worst_request_id"]) == (2, {"loss": 1, "weight": 1}, "bad")


def test_a_time_without_requests_is_said_to_be_one() -> None:
    assert choices_text.summary_text((), 300) == "no request was sent in the last 5 min"
    nothing = hindsight(decided(dispatch(0, "r", reason="hashed", snapshot_version=None, prompt_tokens_estimate=0)))
    row = lines(choices_text.summary_text(nothing, 60))[3]
    assert row == [MODEL, "1", "-", "-", "-", "-", "-", "0.0%", "hashed", "1"]


@pytest.mark.parametrize("name", ["req_nonsense", "01a22bdf-833e-7164-81b0-26695372c29a"])
async def test_a_request_of_which_there_is_no_choice_may_have_been_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(choices.runfile, "running", lambda _path: None)
    monkeypatch.setattr(choices, "_now_ms", lambda: NOW_MS * 2)
    with pytest.raises(StackError, match="was refused at once, as in overload, was never sent anywhere"):
        await choices.about(tmp_path, name, print)
