"""Settings from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.errors import SettingsError
from wire.settings import ClickHouse, Cluster, Settings


def read(**variables: str) -> Settings:
    return Settings.from_env({f"MILLSTREAM_{name}": text for name, text in variables.items()})


def test_without_variables_everything_has_its_default() -> None:
    settings = Settings.from_env({"PATH": "/bin", "MILLSTREAM_TEST_ONLY": "x"})
    assert settings == Settings()
    assert settings.cluster == Cluster(bootstrap="127.0.0.1:9092", replication=1)


def test_each_kind_of_value_is_read() -> None:
    settings = read(
        PORT="9000",
        SIMULATED_TTFT_MS="2.5",
        REGION="eu",
        REGIONS='{"eu": {"bootstrap": "a:1,b:2", "security": "SASL_SSL", "ca_file": "/ca"}}',
        CLICKHOUSE='{"host": "db", "secure": true}',
        STATE_DIR="/var/lib/x",
        MODEL_DIR="",
        PRICE_BOOK="/etc/prices",
        KEY_SECRET="123",
    )
    assert (settings.port, settings.simulated_ttft_ms, settings.key_secret) == (9000, 2.5, "123")
    assert settings.cluster == Cluster(bootstrap="a:1,b:2", security="SASL_SSL", ca_file="/ca")
    assert settings.clickhouse == ClickHouse(host="db", secure=True)
    assert settings.state_dir == Path("/var/lib/x")
    assert settings.model_dir is None
    assert settings.price_book == Path("/etc/prices")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"PROT": "1"}, "MILLSTREAM_PROT is no setting"),
        ({"PORT": "many"}, "MILLSTREAM_PORT is 'many'; it must be a whole number"),
        ({"PORT": "65536"}, "a port is from 0 to 65535"),
        ({"METRICS_PORT": "-1"}, "MILLSTREAM_METRICS_PORT is -1"),
        ({"SIMULATED_TBT_MS": "fast"}, "it must be a number"),
        ({"CLICKHOUSE": "db:8123"}, "it must be JSON"),
        ({"CLICKHOUSE": '{"port": "x"}'}, "it must be JSON"),
        ({"REGIONS": '{"local": {"bootstrap": "a", "bootstarp": "b"}}'}, "it must be JSON"),
        (
            {"REGIONS": '{"local": {"bootstrap": "a"}, "local": {"bootstrap": "b"}}'},
            "MILLSTREAM_REGIONS names 'local' twice",
        ),
        ({"REGION": "mars"}, "MILLSTREAM_REGION is 'mars', but MILLSTREAM_REGIONS has no cluster"),
        ({"RESIDENCY": '["mars"]'}, "MILLSTREAM_RESIDENCY names 'mars', but MILLSTREAM_REGIONS has no such region"),
        ({"RESIDENCY": "mars"}, "it must be JSON"),
        ({"ENGINE_KIND": "steam"}, "use torch or simulated"),
        ({"ENGINE_DEVICE": "tpu"}, "use cpu, cuda or reference"),
        ({"POOL": "tpu"}, "use gpu or cpu"),
        ({"SHED_LOSS": "inf"}, "MILLSTREAM_SHED_LOSS is inf; it must be a finite number, 0 or more"),
        ({"SHED_LOSS": "nan"}, "MILLSTREAM_SHED_LOSS is nan; it must be a finite number, 0 or more"),
        ({"SHED_LOSS": "-1"}, "MILLSTREAM_SHED_LOSS is -1.0; it must be a finite number, 0 or more"),
        ({"SLOT": "8"}, "it must be from 0 to MILLSTREAM_SLOTS - 1 = 7"),
    ],
)
def test_a_bad_value_stops_the_start_with_a_sentence(variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(**variables)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LOG_LEVEL", "debug"),
        ("ENGINE_SLOTS", "0"),
        ("KEEP_ALIVE_MS", "-5"),
        ("ENGINE_QUEUE", "-1"),
        ("SIMULATED_TBT_MS", "-0.5"),
        ("SIMULATED_TTFT_MS", "inf"),
        ("SIMULATED_TTFT_MS", "nan"),
    ],
)
def test_what_can_not_work_is_named(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=f"^MILLSTREAM_{name} is "):
        read(**{name: text})


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"eu/us": -1}', "says -1.0 for 'eu/us'; it must be a finite number, 0 or more"),
        ('{"eu/us": NaN}', "says nan for 'eu/us'; it must be a finite number, 0 or more"),
        ('{"eu/us": 1e999}', "says inf for 'eu/us'; it must be a finite number, 0 or more"),
        ('{"eu/us": "near"}', "it must be JSON as docs/operating.md shows"),
        (f'{{"eu/us": {"9" * 400}}}', "it must be"),
        (f'{{"eu/us": {"9" * 5000}}}', "it must be JSON as docs/operating.md shows"),
        ('{"eu/mars": 90}', "names 'eu/mars'; it must be two different regions of MILLSTREAM_REGIONS"),
        ('{"eu/eu": 0}', "names 'eu/eu'; it must be two different regions"),
        ('{"eu-us": 90}', "names 'eu-us'; it must be two different regions"),
        ('{"eu": 90}', "names 'eu'; it must be two different regions"),
        ('{"eu/us": 90, "us/eu": 80}', "names both 'eu/us' and 'us/eu', which are the same"),
        ('{"eu/us": 90, "us/eu": 90}', "names both 'eu/us' and 'us/eu', which are the same"),
        ('{"eu/us": 90, "eu/us": 80}', "names 'eu/us' twice"),
    ],
)
def test_a_round_trip_that_can_not_be_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read(REGION="eu", REGIONS='{"eu": {"bootstrap": "a:1"}, "us": {"bootstrap": "b:1"}}', ROUND_TRIPS_MS=text)
    assert str(caught.value).startswith("MILLSTREAM_ROUND_TRIPS_MS ")
    assert sentence in str(caught.value)


def test_no_round_trip_at_all_is_one() -> None:
    settings = read(
        REGION="eu", REGIONS='{"eu": {"bootstrap": "a:1"}, "us": {"bootstrap": "b:1"}}', ROUND_TRIPS_MS='{"us/eu": 0}'
    )
    assert settings.trips_ms("eu") == {"eu": 0, "us": 0}


def test_where_requests_may_go_and_how_far_that_is() -> None:
    settings = read(
        REGION="eu",
        REGIONS='{"eu": {"bootstrap": "a:1"}, "us": {"bootstrap": "b:1"}, "asia": {"bootstrap": "c:1"}}',
        ROUND_TRIPS_MS='{"eu/us": 90}',
        RESIDENCY='["eu"]',
    )
    assert settings.open_to("eu") == ("eu",)
    assert settings.open_to("us") == ("us", "eu", "asia")
    assert settings.forbidden() == {("eu", "us"), ("eu", "asia")}
    assert settings.trips_ms("us") == {"eu": 90, "us": 0, "asia": 100}
    assert settings.between_ms()["asia", "eu"] == 100
