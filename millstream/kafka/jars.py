"""Kafka's jars: fetched once by Maven as the pom pins them, kept in the cache, and the Java that runs them."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from millstream.kafka.errors import KafkaSetupError

JAVA_AT_LEAST = 17
_INSTALL_JAVA = "install it: apt-get install openjdk-17-jre-headless"
_POM = Path(__file__).with_name("pom.xml")


def fetch(cache_dir: Path, progress: Callable[[str], None]) -> Path:
    """The directory with Kafka's jars; fetches them the first time (54 MB), telling `progress` a sentence.

    KafkaSetupError when Maven is missing or fails.
    """
    done = cache_dir / f"kafka-{hashlib.sha256(_POM.read_bytes()).hexdigest()[:12]}"
    if done.is_dir():
        return done
    mvn = shutil.which("mvn")
    if mvn is None:
        raise KafkaSetupError(
            "Maven fetches Kafka's jars, but mvn isn't on the PATH; install it: apt-get install maven"
        )
    progress("fetching Apache Kafka's jars (54 MB, once)")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kafka-", dir=cache_dir) as scratch:
        fetched = Path(scratch) / "jars"
        _copy_dependencies(mvn, fetched, Path(scratch) / "target")
        try:
            fetched.rename(done)
        except OSError as exc:
            if not done.is_dir():  # another process fetching at the same time is as good
                raise KafkaSetupError(f"Kafka's jars can't be kept in {cache_dir}: {exc}") from exc
    return done


def _copy_dependencies(mvn: str, out: Path, build: Path) -> None:
    argv = [mvn, "-q", "-B", "-f", str(_POM), f"-DbuildDirectory={build}", f"-DoutputDirectory={out}"]
    run = subprocess.run([*argv, "dependency:copy-dependencies"], capture_output=True, text=True, check=False)
    if run.returncode != 0 or not any(out.glob("kafka_*.jar")):
        tail = "\n".join((run.stdout + run.stderr).strip().splitlines()[-5:])
        raise KafkaSetupError(f"Maven could not fetch Kafka's jars; is there a network? It said:\n{tail}")


def find_java() -> Path:
    """The Java on the PATH, of whatever version. KafkaSetupError when there is none."""
    found = shutil.which("java")
    if found is None:
        raise KafkaSetupError(f"Kafka needs Java {JAVA_AT_LEAST} or newer, but java isn't on the PATH; {_INSTALL_JAVA}")
    return Path(found)


def java() -> Path:
    """The Java to run Kafka with. KafkaSetupError when there is none, or one older than 17."""
    found = find_java()
    run = subprocess.run([found, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(\d+)', run.stderr + run.stdout)
    if version is None or int(version[1]) < JAVA_AT_LEAST:
        what = version[1] if version else "of an unknown version"
        raise KafkaSetupError(f"Kafka needs Java {JAVA_AT_LEAST} or newer, but {found} is {what}; {_INSTALL_JAVA}")
    return found
