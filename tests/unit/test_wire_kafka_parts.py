"""The parts of the Kafka bus that need no broker: settings, log lines, sharing out."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from wire.bus import Partition
from wire.errors import SettingsError
from wire.kafka_assignor import Held, Joiner, describe, grant, granted, joiner, share
from wire.kafka_keep import longer
from wire.kafka_link import client_options
from wire.kafka_logs import SILENCE_S, Tamed, tame
from wire.settings import Cluster


def test_a_plain_cluster_needs_only_its_addresses() -> None:
    assert client_options(Cluster(bootstrap="a:1, b:2")) == {
        "bootstrap_servers": ["a:1", "b:2"],
        "security_protocol": "PLAINTEXT",
    }


def test_tls_and_sasl_are_passed_on() -> None:
    options = client_options(
        Cluster(
            bootstrap="a:1",
            security="SASL_SSL",
            sasl_mechanism="SCRAM-SHA-512",
            sasl_username="me",
            sasl_password="secret",
        )
    )
    context = options.pop("ssl_context")
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname
    assert options["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("me", "secret")


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        (Cluster(bootstrap="a:1", security="TLS"), "use one of PLAINTEXT, SSL"),
        (Cluster(bootstrap="a:1", security="SASL_PLAINTEXT"), "needs sasl_mechanism"),
        (Cluster(bootstrap="a:1", security="SSL", ca_file="/nowhere"), "can't be used"),
    ],
)
def test_settings_that_can_not_work_are_refused_with_a_sentence(cluster: Cluster, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        client_options(cluster)


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("not a certificate")
    with pytest.raises(SettingsError, match="can't be used"):
        client_options(Cluster(bootstrap="a:1", security="SSL", cert_file=str(tmp_path / "cert.pem")))


def record(level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord("aiokafka", level, __file__, 1, message, (), None)


def test_each_kind_of_warning_passes_once_in_a_while_and_chatter_not_at_all() -> None:
    now_s = [0.0]
    tamed = Tamed(lambda: now_s[0])
    first = record(logging.ERROR, "can't connect to %s")
    assert tamed.filter(first)
    assert first.levelno == logging.WARNING
    assert not tamed.filter(record(logging.ERROR, "can't connect to %s"))
    assert tamed.filter(record(logging.ERROR, "something else"))
    assert not tamed.filter(record(logging.INFO, "joined a group"))
    now_s[0] = SILENCE_S
    assert tamed.filter(record(logging.WARNING, "can't connect to %s"))


def test_where_debugging_is_on_the_chatter_passes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aiokafka")
    assert Tamed().filter(record(logging.INFO, "joined a group"))


def test_taming_twice_changes_nothing() -> None:
    tame()
    filters = list(logging.getLogger("aiokafka.conn").filters)
    tame()
    assert logging.getLogger("aiokafka.conn").filters == filters


# ---------------------------------------------------------------- sharing out

COUNTS = {"requests": 4, "batch": 4}.__getitem__
TOPICS = ("requests", "batch")


def members(**held: Held) -> dict[str, Joiner]:
    """Members whose ids differ from their names, as those of static members do."""
    return {f"id-{name}": Joiner(name, TOPICS, what) for name, what in held.items()}


def test_a_description_reads_back_and_a_foreign_one_holds_nothing() -> None:
    held = Held((1, 2), 7)
    assert joiner("a", describe(TOPICS, held)) == Joiner("a", TOPICS, held)
    foreign = describe(TOPICS, held).replace(b"{", b"?")
    assert joiner("a", foreign) == Joiner("a", TOPICS, Held())


def test_a_share_is_of_every_topic_alike() -> None:
    shares = share(members(a=Held(), b=Held()), {}, COUNTS)
    assert shares == {"id-a": (0, 1), "id-b": (2, 3)}
    assert granted(grant(TOPICS, (0, 3), {"requests": 4, "batch": 2}.__getitem__)) == {
        Partition("requests", 0),
        Partition("requests", 3),
        Partition("batch", 0),
    }
    assert granted(b"") == frozenset()


def test_members_keep_what_they_say_they_had() -> None:
    shares = share(members(a=Held((2, 3), 4), b=Held((0, 1), 4)), {}, COUNTS)
    assert shares == {"id-a": (2, 3), "id-b": (0, 1)}


def test_a_claim_from_an_older_generation_gives_way() -> None:
    # a was frozen in generation 3 with everything; b was given 2 and 3 in generation 4
    shares = share(members(a=Held((0, 1, 2, 3), 3), b=Held((2, 3), 4)), {}, COUNTS)
    assert shares == {"id-a": (0, 1), "id-b": (2, 3)}


def test_the_leader_remembers_for_a_member_that_is_away() -> None:
    # b's description is as old as its last join; meanwhile the leader had given it 2 and 3
    remembered = {"a": Held((0, 1), 5), "b": Held((2, 3), 5)}
    shares = share(members(a=Held((0, 1), 5), b=Held((), -1), c=Held()), remembered, COUNTS)
    assert set(shares["id-b"]) <= {2, 3}
    assert len(shares["id-b"]) >= 1
    assert set(shares["id-a"]) <= {0, 1}
    assert sorted(n for numbers in shares.values() for n in numbers) == [0, 1, 2, 3]


def test_without_topics_there_is_nothing_to_share() -> None:
    assert share({"id": Joiner("a", (), Held())}, {}, COUNTS) == {"id": ()}


def test_what_is_kept_is_raised_and_never_lowered() -> None:
    wanted = {"retention.ms": "3600000", "min.compaction.lag.ms": "60000", "segment.ms": "9"}
    assert longer({"retention.ms": "300000", "segment.ms": "1"}, wanted) == {"retention.ms": "3600000"}
    assert longer({"retention.ms": "7200000", "min.compaction.lag.ms": "0"}, wanted) == {
        "min.compaction.lag.ms": "60000"
    }
    assert longer({"retention.ms": "-1"}, wanted) == {}, "for ever"
    assert longer({"retention.ms": "1"}, {}) == {}
