"""How a Faust app is made: by Millstream's settings alone, with the cluster's TLS and SASL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faust
import pytest

from aggregator import app as module
from aggregator.app import keep_running, make_app
from wire.settings import Cluster, Settings


def settings(tmp_path: Path, **cluster: str) -> Settings:
    return Settings(state_dir=tmp_path, regions={"local": Cluster(bootstrap="one:9093, two:9094", **cluster)})


def test_an_app_reads_from_every_address_of_its_cluster(tmp_path: Path) -> None:
    app = make_app(settings(tmp_path), "control", member="7")
    assert [(url.host, url.port) for url in app.conf.broker_consumer] == [("one", 9093), ("two", 9094)]
    assert (app.conf.id, app.conf.consumer_group_instance_id) == ("control", "control-7")
    assert app.conf.broker_credentials is None
    assert not app.conf.web_enabled
    assert not app.conf.topic_allow_declare


def test_fausts_own_environment_variables_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_URL", "kafka://elsewhere:1")
    monkeypatch.setenv("WEB_PORT", "1")
    monkeypatch.setenv("TOPIC_ALLOW_DECLARE", "1")
    app = make_app(settings(tmp_path), "ledger")
    assert [url.host for url in app.conf.broker] == ["one", "two"]
    assert not app.conf.topic_allow_declare


def test_nothing_is_written_outside_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = make_app(settings(tmp_path / "state"), "control")
    assert Path(app.conf.datadir).is_relative_to(tmp_path / "state")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_sasl_over_plain_text(tmp_path: Path) -> None:
    known = settings(
        tmp_path, security="SASL_PLAINTEXT", sasl_mechanism="SCRAM-SHA-512", sasl_username="u", sasl_password="p"
    )
    credentials = make_app(known, "control").conf.broker_credentials
    assert isinstance(credentials, faust.SASLCredentials)
    assert (credentials.username, credentials.password) == ("u", "p")
    assert (credentials.protocol.value, credentials.mechanism.value) == ("SASL_PLAINTEXT", "SCRAM-SHA-512")


@pytest.mark.parametrize("security", ["SSL", "SASL_SSL"])
def test_tls_checks_the_brokers_name(tmp_path: Path, security: str) -> None:
    credentials = make_app(settings(tmp_path, security=security), "control").conf.broker_credentials
    assert credentials.protocol.value == security
    context = credentials.context if security == "SSL" else credentials.ssl_context
    assert context.check_hostname


class Crashing:
    """An app that crashes at once and whose `stop` never returns, as Faust's now and then doesn't."""

    conf = SimpleNamespace(id="ledger")
    crash_reason = RuntimeError("a fault")
    loop: Any = None

    async def start(self) -> None: ...

    async def wait(self) -> None: ...

    async def stop(self) -> None:
        await asyncio.Event().wait()


async def test_a_crashed_app_that_does_not_end_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REBUILD_WITHIN_S", 0.01)
    monkeypatch.setattr(module, "REBUILD_PAUSE_S", 0.01)
    stop, made = asyncio.Event(), list[Crashing]()

    def make() -> Any:
        made.append(Crashing())
        return made[-1]

    running = asyncio.create_task(keep_running(make, stop))
    async with asyncio.timeout(60):
        while len(made) < 3:  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
