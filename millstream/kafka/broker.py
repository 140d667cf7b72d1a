"""One Kafka broker in KRaft mode, for one machine: settings, storage, command line, readiness.

`jars` fetches what it runs. All of it blocks but `ready`. The caller owns the process: start `command(…)`, stop it by
SIGTERM (a second or two) or, since the log survives that, by SIGKILL.
"""

from __future__ import annotations

import base64
import logging
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError
from aiokafka.protocol.metadata import MetadataRequest

from millstream.kafka.errors import KafkaSetupError
from millstream.kafka.jars import fetch, find_java, java
from millstream.kafka.warm import archive, make_archive

__all__ = ["BrokerConfig", "KafkaSetupError", "command", "format_storage", "jars", "java", "ready", "render_config"]

_META = "meta.properties"
_LOGGING = Path(__file__).with_name("log4j2.properties")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """What is particular to one broker."""

    data_dir: Path
    """its logs and its cluster id; the settings file lies beside them"""
    port: int
    controller_port: int
    """for the broker itself only; may change from start to start"""
    heap_mb: int = 384

    @property
    def config_file(self) -> Path:
        return self.data_dir.with_name(self.data_dir.name + ".properties")

    @property
    def bootstrap(self) -> str:
        """host:port, for clients."""
        return f"127.0.0.1:{self.port}"


def jars(cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The directory with Kafka's jars. The first time they are fetched and prepared, and `progress` is told so.

    KafkaSetupError without Maven or Java 17, and when Maven fails.
    """
    java()
    jar_dir = fetch(cache_dir, progress)
    if archive(jar_dir) is None:
        progress("preparing Apache Kafka to start fast (once)")
        make_archive(jar_dir, lambda scratch: _trial(jar_dir, scratch))
    return jar_dir


def _trial(jar_dir: Path, scratch: Path) -> list[str]:
    config = BrokerConfig(data_dir=scratch / "data", port=_free_port(), controller_port=_free_port())
    format_storage(jar_dir, config)
    return command(jar_dir, config)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def render_config(config: BrokerConfig) -> str:
    """The broker's settings file. One replica of everything: one machine has no second one."""
    plain, controller = f"127.0.0.1:{config.port}", f"127.0.0.1:{config.controller_port}"
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.bootstrap.servers": controller,
        "listeners": f"PLAINTEXT://{plain},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{plain},CONTROLLER://{controller}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(config.data_dir),
        "auto.create.topics.enable": "false",
        "default.replication.factor": "1",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "share.coordinator.state.topic.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        # a broker that was killed comes back when its old session has ended: 9 s by default
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "background.threads": "2",
        # the default is a third of the heap
        "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


def format_storage(jar_dir: Path, config: BrokerConfig) -> str:
    """Write the settings file and, the first time, make the data directory; the cluster's id.

    Takes 3 s the first time. KafkaSetupError when the directory holds something else, or can't be written.
    """
    try:
        config.data_dir.parent.mkdir(parents=True, exist_ok=True)
        config.config_file.write_text(render_config(config))
        meta = config.data_dir / _META
        if not meta.exists():
            _format(jar_dir, config)
        return _cluster_id(meta)
    except OSError as exc:
        raise KafkaSetupError(
            f"Kafka's data directory can't be used: {exc}; make it writable, or use another --state"
        ) from exc


def _format(jar_dir: Path, config: BrokerConfig) -> None:
    """Format beside the final place, then rename: a directory that exists is whole."""
    if config.data_dir.exists() and any(config.data_dir.iterdir()):
        raise KafkaSetupError(f"{config.data_dir} holds no Kafka log, yet isn't empty; move it away")
    scratch = Path(tempfile.mkdtemp(prefix="kafka-format-", dir=config.data_dir.parent))
    try:
        inside = replace(config, data_dir=scratch / "data")
        inside.config_file.write_text(render_config(inside))
        argv = _java(jar_dir, 128, "kafka.tools.StorageTool", "format", "--standalone", "-t", cluster_id(uuid.uuid4()))
        run = subprocess.run(
            [*argv, "-c", str(inside.config_file)],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if run.returncode != 0:
            raise KafkaSetupError(f"Kafka could not format its data directory:\n{(run.stdout + run.stderr)[-2000:]}")
        inside.data_dir.rename(config.data_dir)
    finally:
        shutil.rmtree(scratch)


def cluster_id(number: uuid.UUID) -> str:
    """A name for a new cluster: the number in base64, as Kafka writes it. Without its first bit: by the other half of
    all numbers some would begin with a hyphen, and Kafka's tool takes such a name for an option."""
    return base64.urlsafe_b64encode(bytes([number.bytes[0] & 0x7F]) + number.bytes[1:]).decode().rstrip("=")


def _cluster_id(meta: Path) -> str:
    for line in meta.read_text().splitlines():
        if line.startswith("cluster.id="):
            return line.removeprefix("cluster.id=")
    raise KafkaSetupError(f"{meta} names no cluster; Kafka's data directory is broken, move {meta.parent} away")


def command(jar_dir: Path, config: BrokerConfig) -> list[str]:
    """The command line that runs the broker in the foreground; it logs warnings and worse to stdout."""
    return _java(jar_dir, config.heap_mb, "kafka.Kafka", str(config.config_file))


def _java(jar_dir: Path, heap_mb: int, *args: str) -> list[str]:
    classes = archive(jar_dir)
    return [
        str(find_java()),
        f"-Xmx{heap_mb}m",
        "-XX:+UseSerialGC",
        # the quick compiler only: half the processor time of a start, and no bursts of compiling beside the engine
        "-XX:TieredStopAtLevel=1",
        *([f"-XX:SharedArchiveFile={classes}", "-Xlog:cds=off"] if classes else []),
        "-XX:+ExitOnOutOfMemoryError",
        "-Djava.awt.headless=true",
        f"-Dlog4j2.configurationFile={_LOGGING}",
        "-cp",
        f"{jar_dir}/*",
        *args,
    ]


async def ready(bootstrap: str) -> bool:
    """Whether a broker answers there and serves (it listens a while before it does)."""
    host, _, port = bootstrap.rpartition(":")
    try:
        conn = await create_conn(host, int(port), client_id="millstream-ready", request_timeout_ms=2_000)
    except (OSError, TimeoutError, KafkaError):
        return False
    try:
        return bool((await conn.send(MetadataRequest([]))).brokers)
    except (OSError, TimeoutError, KafkaError):
        logging.getLogger(__name__).debug("%s answers no metadata yet", bootstrap)
        return False
    finally:
        await conn.close()
