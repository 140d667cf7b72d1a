"""Settings, read from the environment once. A bad one stops the start with a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wire.errors import SettingsError

T = TypeVar("T")
PREFIX = "MILLSTREAM_"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach a region's Kafka cluster."""

    bootstrap: str
    """host:port, comma-separated"""
    security: str = "PLAINTEXT"
    """PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL"""
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: str | None = None
    replication: int = 3
    """replication factor of the topics that are created"""


class ClickHouse(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach the ledger's database."""

    host: str = "127.0.0.1"
    port: int = 8123
    username: str = "default"
    password: str = ""
    database: str = "millstream"
    secure: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings; each process uses what concerns it. Field `port` is read from MILLSTREAM_PORT, and so on."""

    region: str = "local"
    regions: dict[str, Cluster] = msgspec.field(
        default_factory=lambda: {"local": Cluster(bootstrap="127.0.0.1:9092", replication=1)}
    )
    """region → cluster, as JSON: {"local": {"bootstrap": "127.0.0.1:9092"}}"""
    state_dir: Path = Path(".millstream")
    clickhouse: ClickHouse = ClickHouse()
    """as JSON"""

    round_trips_ms: dict[str, float] = {}
    """between two regions, as JSON: {"eu/us": 90}; what isn't named takes 100"""
    residency: tuple[str, ...] = ()
    """regions whose requests must not leave them, as JSON: ["eu"]"""

    routing_policy: str = "marginal"
    """marginal: least expected loss within the optimizer's weights; earlier: hashing by a feedback loop's weights"""

    # ingress
    host: str = "127.0.0.1"
    port: int = 8080
    slot: int = 0
    """this ingress's partition of replies.<region>"""
    slots: int = 8
    """reply slots of the region"""
    key_secret: str = ""
    """at least 32 hex digits: the HMAC key under which API keys are stored"""
    credentials_max_age_ms: int = 60_000
    """a credential cache that could not be checked against the log for longer refuses (R: auth is never stale)"""
    accept_timeout_ms: int = 20_000
    """how long a request may wait for its Accepted, over all attempts"""
    attempt_timeout_ms: int = 5_000
    """how long one attempt may wait while there is another shard to try"""
    request_timeout_ms: int = 600_000
    header_timeout_ms: int = 10_000
    """a stream's status line goes out after this at the latest"""
    keep_alive_ms: int = 10_000
    """silence on a stream after which a comment is sent"""
    max_body_bytes: int = 8 * 1024 * 1024
    max_open_streams: int = 4_000
    stream_buffer_bytes: int = 1024 * 1024
    """what may wait for a slow reader before its stream is cancelled"""

    # workers
    engine: str = "engine-0"
    """a stable name: also the static member id"""
    engine_kind: str = "torch"
    """torch or simulated"""
    engine_slots: int = 32
    """sequences that run at once"""
    engine_queue: int = 256
    """accepted requests that may wait for a slot; more are refused"""
    engine_prefix_tokens: int = 16_384
    """tokens of prompts whose computed beginnings an engine keeps for prompts that begin alike; 0 = none"""
    engine_threads: int = 2
    engine_device: str = "cpu"
    """cpu; cuda: one or more GPUs; reference: the GPU engine in plain torch on the CPU, to check it without one"""
    pool: str = "cpu"
    model: str = ""
    """public name; must be in the catalogue"""
    model_version: str = "1"
    model_dir: Path | None = None
    """converted model (`millstream up` makes it)"""
    numerics: str = "sim"
    context_tokens: int = 2048
    session_timeout_ms: int = 10_000
    orphan_grace_ms: int = 30_000
    """how long requests run on whose ingress has vanished (R4)"""
    drain_timeout_ms: int = 20_000
    simulated_ttft_ms: float = 20.0
    simulated_tbt_ms: float = 5.0

    # aggregator
    price_book: Path | None = None
    """None = the one that ships"""
    snapshot_interval_ms: int = 1_000

    # all
    shed_wait_ms: int = 300_000
    """ingress and control: how long a request may be expected to wait for its first token before some are refused"""
    shed_loss: float = 0.0
    """ingress: the expected loss, in requests, above which one is refused while engines are busy; 0 = never"""
    log_level: str = "INFO"
    metrics_port: int = 0
    """0 = no metrics server of its own (the ingress serves /metrics on its port)"""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """The settings of MILLSTREAM_… variables. SettingsError names the variable, and what would be right."""
        known = {PREFIX + f.name.upper(): f for f in msgspec.structs.fields(cls)}
        values: dict[str, Any] = {}
        for name, text in environ.items():
            if not name.startswith(PREFIX) or name.startswith(PREFIX + "TEST_"):
                continue
            if name not in known:
                raise SettingsError(f"{name} is no setting of Millstream; the settings are listed in docs/operating.md")
            field = known[name]
            values[field.name] = _parse(name, text, field.type)
        settings = cls(**values)
        settings.check()
        return settings

    def check(self) -> None:
        """SettingsError for what no single value shows."""
        if self.region not in self.regions:
            raise SettingsError(
                f"{PREFIX}REGION is {self.region!r}, but {PREFIX}REGIONS has no cluster of that name; add one"
            )
        for region in self.residency:
            if region not in self.regions:
                raise SettingsError(f"{PREFIX}RESIDENCY names {region!r}, but {PREFIX}REGIONS has no such region")
        self._check_round_trips()
        if self.engine_kind not in ("torch", "simulated"):
            raise SettingsError(f"{PREFIX}ENGINE_KIND is {self.engine_kind!r}; use torch or simulated")
        if self.engine_device not in ("cpu", "cuda", "reference"):
            raise SettingsError(f"{PREFIX}ENGINE_DEVICE is {self.engine_device!r}; use cpu, cuda or reference")
        if self.routing_policy not in ("marginal", "earlier"):
            raise SettingsError(f"{PREFIX}ROUTING_POLICY is {self.routing_policy!r}; use marginal or earlier")
        if self.pool not in ("gpu", "cpu"):
            raise SettingsError(f"{PREFIX}POOL is {self.pool!r}; use gpu or cpu")
        if not 0 <= self.slot < self.slots:
            raise SettingsError(
                f"{PREFIX}SLOT is {self.slot}; it must be from 0 to {PREFIX}SLOTS - 1 = {self.slots - 1}"
            )
        if self.log_level not in LOG_LEVELS:
            raise SettingsError(f"{PREFIX}LOG_LEVEL is {self.log_level!r}; use {', '.join(LOG_LEVELS)}")
        for name in _AT_LEAST_ONE:
            if not getattr(self, name) >= 1:
                raise SettingsError(f"{PREFIX}{name.upper()} is {getattr(self, name)}; it must be at least 1")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                raise SettingsError(f"{PREFIX}{name.upper()} is {getattr(self, name)}; it must be {_AT_LEAST_ZERO}")
        for name in ("port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise SettingsError(f"{PREFIX}{name.upper()} is {getattr(self, name)}; a port is from 0 to 65535")

    def _check_round_trips(self) -> None:
        name = f"{PREFIX}ROUND_TRIPS_MS"
        ways = {f"{one}/{other}": f"{other}/{one}" for one in self.regions for other in self.regions if one != other}
        for way, ms in self.round_trips_ms.items():
            if way not in ways:
                raise SettingsError(
                    f'{name} names {way!r}; it must be two different regions of {PREFIX}REGIONS, joined by "/"'
                )
            if ways[way] in self.round_trips_ms:
                raise SettingsError(f"{name} names both {way!r} and {ways[way]!r}, which are the same; leave one out")
            if not 0 <= ms < math.inf:
                raise SettingsError(f"{name} says {ms} for {way!r}; it must be {_AT_LEAST_ZERO}")

    def between_ms(self) -> dict[tuple[str, str], float]:
        """Round trips between regions, as pairs."""
        return {(one, other): ms for one in self.regions for other, ms in self.trips_ms(one).items()}

    def trips_ms(self, region: str) -> dict[str, float]:
        """Round trips from a region to each."""
        named = self.round_trips_ms
        return {
            other: named.get(f"{region}/{other}", named.get(f"{other}/{region}", FAR_MS if other != region else 0.0))
            for other in self.regions
        }

    def open_to(self, region: str) -> tuple[str, ...]:
        """The regions where requests of this one may be served, itself first."""
        return (region, *(other for other in self.regions if other != region and region not in self.residency))

    def forbidden(self) -> frozenset[tuple[str, str]]:
        """(from, to): where requests may not go."""
        return frozenset((one, other) for one in self.residency for other in self.regions if other != one)

    @property
    def cluster(self) -> Cluster:
        """The cluster of this process's own region."""
        return self.regions[self.region]


FAR_MS = 100.0
"""a round trip that nobody measured: so far that what can stay does"""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_AT_LEAST_ONE = (
    "slots",
    "credentials_max_age_ms",
    "accept_timeout_ms",
    "attempt_timeout_ms",
    "request_timeout_ms",
    "header_timeout_ms",
    "keep_alive_ms",
    "max_body_bytes",
    "max_open_streams",
    "stream_buffer_bytes",
    "engine_slots",
    "engine_threads",
    "context_tokens",
    "session_timeout_ms",
    "orphan_grace_ms",
    "snapshot_interval_ms",
    "shed_wait_ms",
)
_AT_LEAST_ZERO = "a finite number, 0 or more"
_NOT_NEGATIVE = (
    "engine_queue",
    "engine_prefix_tokens",
    "drain_timeout_ms",
    "simulated_ttft_ms",
    "simulated_tbt_ms",
    "shed_loss",
)


def _parse(name: str, text: str, kind: Any) -> Any:
    hooks: dict[Any, Callable[[str], Any]] = {
        Path: Path,
        Path | None: lambda t: Path(t) if t else None,
        str: str,
    }
    if kind in hooks:
        return hooks[kind](text)
    try:
        if kind in (int, float, bool):
            return msgspec.convert(text, kind, strict=False)
        return msgspec.convert(json.loads(text, object_pairs_hook=_distinct), kind)
    except _Repeated as exc:
        raise SettingsError(f"{name} names {exc} twice; leave one out") from exc
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as exc:
        want = {int: "a whole number", float: "a number", bool: "true or false"}.get(
            kind, "JSON as docs/operating.md shows"
        )
        raise SettingsError(f"{name} is {text!r}; it must be {want}") from exc


class _Repeated(Exception):
    """A name that a JSON object has more than once; a parser would keep the last of its values and say nothing."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Repeated(repr(name))
        found[name] = value
    return found
