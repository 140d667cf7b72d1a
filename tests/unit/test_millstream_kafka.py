"""The broker's jars, settings and storage; starting it for real is what every test marked kafka does."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from millstream.kafka.broker import (
    BrokerConfig,
    KafkaSetupError,
    cluster_id,
    command,
    format_storage,
    jars,
    java,
    ready,
    render_config,
)
from millstream.kafka.warm import archive, make_archive
from millstream.paths import cache_dir

CONFIG = BrokerConfig(data_dir=Path("/data/kafka"), port=9092, controller_port=9093)


def tool(directory: Path, name: str, script: str) -> None:
    """A program of this name that does what the shell script says."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)


def test_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir({"XDG_CACHE_HOME": "/c"}) == Path("/c/millstream")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_dir({}) == Path("/home/me/.cache/millstream")


def test_the_settings_keep_one_replica_of_everything_and_create_no_topic() -> None:
    lines = dict(line.split("=", 1) for line in render_config(CONFIG).splitlines())
    assert lines["auto.create.topics.enable"] == "false"
    factors = {name: value for name, value in lines.items() if "replication.factor" in name or "min.isr" in name}
    assert len(factors) == 6
    assert set(factors.values()) == {"1"}
    assert lines["listeners"] == "PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093"
    assert lines["log.dirs"] == "/data/kafka"
    assert CONFIG.config_file == Path("/data/kafka.properties")
    assert CONFIG.bootstrap == "127.0.0.1:9092"


def test_a_missing_java_or_maven_is_named_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(KafkaSetupError, match="apt-get install openjdk-17-jre-headless"):
        java()
    tool(tmp_path / "bin", "java", "echo 'openjdk version \"11.0.2\"' >&2")
    with pytest.raises(KafkaSetupError, match="is 11; install it"):
        java()
    tool(tmp_path / "bin", "java", "echo nonsense")
    with pytest.raises(KafkaSetupError, match="of an unknown version"):
        java()
    tool(tmp_path / "bin", "java", "echo 'openjdk version \"21.0.1\"' >&2")
    with pytest.raises(KafkaSetupError, match="apt-get install maven"):
        jars(tmp_path / "cache", lambda sentence: None)


def test_a_maven_that_fails_is_quoted_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path / "bin", "java", "echo 'openjdk version \"17\"' >&2")
    tool(tmp_path / "bin", "mvn", "echo 'no route to the repository'; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    said: list[str] = []
    with pytest.raises(KafkaSetupError, match="no route to the repository"):
        jars(tmp_path / "cache", said.append)
    assert said == ["fetching Apache Kafka's jars (54 MB, once)"]
    assert list((tmp_path / "cache").iterdir()) == []


def test_jars_are_fetched_and_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a java that formats, starts, and dumps its classes when it is told to end
    tool(
        tmp_path / "bin",
        "java",
        """case "$*" in
          *-version*) echo 'openjdk version "17"' >&2 ;;
          *StorageTool*) for last; do :; done; dir=$(sed -n 's/^log.dirs=//p' "$last")
            mkdir "$dir"; echo cluster.id=abc > "$dir/meta.properties" ;;
          *) out=${1#-XX:ArchiveClassesAtExit=}; trap 'touch "$out"; exit 0' TERM
            echo "Kafka Server started"; while :; do sleep 0.05; done ;;
        esac""",
    )
    tool(
        tmp_path / "bin",
        "mvn",
        """for arg; do case "$arg" in -DoutputDirectory=*)
            mkdir -p "${arg#*=}"; touch "${arg#*=}/kafka_1.jar" ;;
        esac; done""",
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    said: list[str] = []
    found = jars(tmp_path / "cache", said.append)
    assert jars(tmp_path / "cache", said.append) == found
    assert len(said) == 2
    assert [path.name for path in sorted(found.iterdir())] == ["classes.jsa", "kafka_1.jar"]
    assert f"-XX:SharedArchiveFile={found / 'classes.jsa'}" in command(found, CONFIG)
    config = BrokerConfig(data_dir=tmp_path / "state" / "data", port=1, controller_port=2)
    assert format_storage(found, config) == format_storage(found, config) == "abc"
    assert sorted(path.name for path in config.data_dir.parent.iterdir()) == ["data", "data.properties"]


def test_a_broker_that_can_not_start_leaves_no_archive(tmp_path: Path) -> None:
    tool(tmp_path / "bin", "java", "echo broken; exit 1")
    make_archive(tmp_path, lambda scratch: [str(tmp_path / "bin" / "java")])
    assert archive(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("something", "else", "holds no Kafka log, yet isn't empty"),
        ("meta.properties", "version=1", "names no cluster"),
    ],
)
def test_a_directory_that_is_no_kafka_log_is_left_alone(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / name).write_text(text)
    with pytest.raises(KafkaSetupError, match=sentence):
        format_storage(tmp_path, BrokerConfig(data_dir=data, port=1, controller_port=2))
    assert (data / name).read_text() == text


def test_a_state_directory_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = BrokerConfig(data_dir=tmp_path / "file" / "data", port=1, controller_port=2)
    with pytest.raises(KafkaSetupError, match="can't be used"):
        format_storage(tmp_path, config)


def test_no_clusters_name_begins_like_an_option() -> None:
    names = {cluster_id(uuid.UUID(int=first << 120 | 7)) for first in range(256)}
    assert all(name[0].isalpha() and len(name) == 22 for name in names)
    assert len(names) == 128


def test_a_format_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(
        tmp_path / "bin", "java", """case "$1" in -version) echo 'version "17"' ;; *) echo disk full; exit 1 ;; esac"""
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    config = BrokerConfig(data_dir=tmp_path / "state" / "data", port=1, controller_port=2)
    with pytest.raises(KafkaSetupError, match="disk full"):
        format_storage(tmp_path, config)
    assert [path.name for path in config.data_dir.parent.iterdir()] == ["data.properties"]


async def test_a_port_where_nobody_listens_is_not_ready() -> None:
    assert not await ready("127.0.0.1:1")
