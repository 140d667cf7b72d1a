"""The one table of topics."""

from __future__ import annotations

import re

from wire_samples import FLEET

from wire import topics
from wire.topics import FleetTopics, Topic, all_topics


def test_a_fleets_topics_and_group_carry_its_name() -> None:
    names = FleetTopics(FLEET)
    assert names.requests == "requests.local.cpu.m.1.sim"
    assert names.batch == "batch.local.cpu.m.1.sim"
    assert names.journal == "journal.local.cpu.m.1.sim"
    assert names.group == "workers.local.cpu.m.1.sim"
    assert topics.journal_fleet(names.journal) == FLEET


def test_an_installation_has_each_topic_once_with_a_name_that_kafka_takes() -> None:
    table = all_topics([(FLEET, 4)], [("local", 8)])
    names = [topic.name for topic in table]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-zA-Z0-9._-]{1,249}", name) for name in names)
    by_name = {topic.name: topic for topic in table}
    assert by_name[FleetTopics(FLEET).journal].partitions == by_name[FleetTopics(FLEET).requests].partitions == 4
    assert by_name[topics.replies("local")].partitions == 8
    assert by_name[topics.dispatches("local")].partitions == 1


def test_only_what_may_be_lost_is_acknowledged_by_the_leader_alone() -> None:
    loose = {t.name for t in all_topics([(FLEET, 1)], [("local", 1)]) if t.acks == "leader"}
    assert loose == {"replies.local", "dispatches.local", "signals"}


def test_what_holds_whole_requests_takes_16_mb() -> None:
    large = {t.name for t in all_topics([(FLEET, 1)], [("local", 1)]) if t.max_message_bytes == 16 * 1024 * 1024}
    names = FleetTopics(FLEET)
    assert {names.requests, names.batch, names.journal, "responses"} <= large


def test_settings_of_a_deleted_topic() -> None:
    config = Topic(name="t", partitions=1, retention_ms=600_000, retention_bytes=5).config()
    assert config["cleanup.policy"] == "delete"
    assert (config["retention.ms"], config["segment.ms"]) == ("600000", "100000")
    assert config["retention.bytes"] == "5"
    assert config["max.message.bytes"] == str(1024 * 1024)
    # prompts don't outlive their time by much, yet segments aren't made every second
    assert Topic(name="t", partitions=1, retention_ms=1_000).config()["segment.ms"] == "60000"


def test_settings_of_a_compacted_topic() -> None:
    config = Topic(name="t", partitions=1, retention_ms=None).config()
    assert config["cleanup.policy"] == "compact"
    assert "retention.ms" not in config
    both = Topic(name="t", partitions=1, retention_ms=None, compact_horizon_ms=7).config()
    assert (both["cleanup.policy"], both["retention.ms"]) == ("compact,delete", "7")


def test_all_that_choices_are_made_from_is_kept_for_the_same_hour() -> None:
    by_name = {topic.name: topic for topic in all_topics([], [("local", 1)])}
    kept = [by_name[name].config()["retention.ms"] for name in ("signals", topics.dispatches("local"))]
    assert [*kept, by_name["weights"].config()["min.compaction.lag.ms"]] == ["3600000"] * 3
    assert "min.compaction.lag.ms" not in by_name["credentials"].config()


def test_a_snapshots_key_names_region_and_model() -> None:
    assert topics.weights_key("meta/llama", "eu") == b"eu/meta/llama"
