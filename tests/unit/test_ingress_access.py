"""Who may ask, for what, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from ingress_world import KEY, SECRET, credential, model

from ingress.catalogue import find, shown, targets, version_of, visible
from ingress.credentials import Authenticator, hmac_secret, key_id_of
from ingress.errors import ApiError
from ingress.limits import FORGET_AFTER_MS, Limiter
from wire.errors import SettingsError
from wire.messages import Credential, Limits, ModelVersion


@dataclass
class Cache:
    items: dict[str, Credential] = field(default_factory=dict)
    age_ms: float = 0.0


def authenticator(*known: Credential, age_ms: float = 0.0) -> Authenticator:
    return Authenticator(Cache({c.key_id: c for c in known}, age_ms), hmac_secret(SECRET), 60_000)


def test_a_good_key_is_its_credential() -> None:
    assert authenticator(credential()).authenticate(f"Bearer {KEY}") == credential()
    assert authenticator(credential()).authenticate(f"bearer  {KEY} ") == credential()


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        KEY,
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer sk-ms-other-0123456789",
        "Bearer sk-ms-dev",
        "Bearer sk-ms-dev-",
        "Bearer sk-ms--x",
        "Bearer ' OR 1=1 --",
        "Bearer sk-ms-dev-' OR 1=1 --",
        "Bearer \u00e9\u4e16",
        "Bearer sk-ms-dev-" + "x" * 10_000,
        "Bearer \x00",
    ],
)
def test_any_other_header_is_401(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        authenticator(credential()).authenticate(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert (b"x-should-retry", b"false") in caught.value.headers()


def test_a_revoked_key_is_401() -> None:
    with pytest.raises(ApiError, match="revoked"):
        authenticator(credential(revoked_ms=5)).authenticate(f"Bearer {KEY}")


@pytest.mark.parametrize("age_ms", [60_001, float("inf")])
def test_a_cache_too_old_to_know_of_revocations_refuses_everybody(age_ms: float) -> None:
    with pytest.raises(ApiError) as caught:
        authenticator(credential(), age_ms=age_ms).authenticate(f"Bearer {KEY}")
    assert caught.value.status == 503
    assert caught.value.retry_after_s


def test_key_ids_end_at_the_first_dash() -> None:
    assert key_id_of("sk-ms-a1-b-c") == "a1"
    assert key_id_of("sk-other-a1-b") is None


@pytest.mark.parametrize("secret", ["", "zz" * 16, "ab" * 15])
def test_a_short_secret_stops_the_start(secret: str) -> None:
    with pytest.raises(SettingsError, match="32 hex digits"):
        hmac_secret(secret)


def test_limits_of_requests_refill_with_time() -> None:
    limiter, limits = Limiter(), {"k": Limits(requests_per_minute=2)}
    for _ in range(2):
        limiter.admit(limits, 0).release(0)
    with pytest.raises(ApiError) as caught:
        limiter.admit(limits, 0)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 30), "one of two a minute: back in 30 s"
    limiter.admit(limits, 30_000)


def test_concurrent_calls_are_counted_until_released_once() -> None:
    limiter, limits = Limiter(), {"k": Limits(concurrent=1)}
    permit = limiter.admit(limits, 0)
    with pytest.raises(ApiError, match="concurrent"):
        limiter.admit(limits, 0)
    permit.release(0)
    permit.release(0)
    again = limiter.admit(limits, 0)
    with pytest.raises(ApiError):
        limiter.admit(limits, 0)
    again.release(0)


def test_tokens_overdraw_once_and_then_wait() -> None:
    limiter, limits = Limiter(), {"k": Limits(tokens_per_minute=60)}
    limiter.admit(limits, 0).release(90)
    with pytest.raises(ApiError) as caught:
        limiter.admit(limits, 0)
    assert caught.value.retry_after_s == 31, "30 overdrawn at one a second, and one to have"
    limiter.admit(limits, 31_000)


def test_a_refused_call_uses_nothing_up() -> None:
    limiter = Limiter()
    tight, wide = Limits(concurrent=0), Limits(requests_per_minute=1)
    with pytest.raises(ApiError):
        limiter.admit({"wide": wide, "tight": tight}, 0)
    limiter.admit({"wide": wide}, 0)


def test_zero_requests_a_minute_means_none() -> None:
    with pytest.raises(ApiError) as caught:
        Limiter().admit({"k": Limits(requests_per_minute=0)}, 0)
    assert caught.value.retry_after_s == 60


def test_idle_users_are_forgotten() -> None:
    limiter = Limiter()
    limiter.admit({"k": Limits(requests_per_minute=1)}, 0).release(0)
    limiter.forget_idle(FORGET_AFTER_MS)
    with pytest.raises(ApiError):
        limiter.admit({"k": Limits(requests_per_minute=0)}, FORGET_AFTER_MS)
    limiter.forget_idle(3 * FORGET_AFTER_MS)


def versions(*shares: float) -> tuple[ModelVersion, ...]:
    return tuple(
        ModelVersion(version=str(i), numerics="sim", pools=("cpu", "gpu"), regions=("eu", "us"), share=share, shards=2)
        for i, share in enumerate(shares)
    )


def test_versions_get_their_share_and_a_request_always_the_same() -> None:
    rolled = model(versions=versions(0.9, 0.1, 0.0))
    ids = [f"request-{i}" for i in range(4_000)]
    counts = [sum(version_of(rolled, i).version == v for i in ids) for v in "012"]
    assert 3_480 <= counts[0] <= 3_720, "0.9 × 4,000 = 3,600 ± 6 standard deviations of 19"
    assert counts[2] == 0
    assert [version_of(rolled, i) for i in ids] == [version_of(rolled, i) for i in ids]


def test_requests_may_go_where_the_version_is_and_they_may_leave_for() -> None:
    served = model(versions=versions(1.0))
    version = served.versions[0]
    assert {t.fleet.region for t in targets(served, version, ("eu",))} == {"eu"}
    assert len(targets(served, version, ("eu",))) == 2 * 2, "pools × shards"
    assert [t.fleet.region for t in targets(served, version, ("us", "asia", "eu"))] == ["eu"] * 4 + ["us"] * 4
    with pytest.raises(ApiError, match="isn't served where this request may go"):
        targets(served, version, ("asia",))


def test_a_key_sees_only_the_models_it_may_use() -> None:
    models = {m.name: m for m in (model("b/x"), model("a"), model("none", versions=()))}
    assert [m.name for m in visible(models.values(), credential())] == ["a", "b/x"]
    limited = credential(limits=Limits(models=("a",)))
    assert find(models, "a", limited)
    for name in ("b/x", "none", "zzz", "/../", "x" * 100_000):
        with pytest.raises(ApiError) as caught:
            find(models, name, limited)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")
        assert len(caught.value.message) < 400


def test_a_model_is_shown_as_benchmarks_expect_it() -> None:
    seen: dict[str, Any] = shown(model())
    assert seen["root"] == seen["id"]
    assert (seen["object"], seen["created"]) == ("model", 1_700_000_000)
