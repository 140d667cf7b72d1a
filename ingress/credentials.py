"""Who asks? Keys are checked against the log's credentials in memory; no database is ever asked."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Protocol

from ingress.errors import bad_key, unavailable
from wire.errors import SettingsError
from wire.messages import Credential

PREFIX = "sk-ms-"
MAX_KEY_LENGTH = 512
_NO_KEY = (
    "You didn't provide an API key. Send it in an Authorization header using Bearer auth"
    " (Authorization: Bearer YOUR_KEY)."
)
_WRONG_KEY = "Incorrect API key provided. `millstream keys list` shows which keys there are."
_REVOKED = "This API key has been revoked; use another one."


class Cache(Protocol):
    """What is needed of `wire.follow.Follower`."""

    @property
    def items(self) -> Mapping[str, Credential]: ...

    @property
    def age_ms(self) -> float: ...


def hmac_secret(key_secret: str) -> bytes:
    """The secret of a `key_secret` setting; SettingsError unless it is at least 32 hex digits."""
    try:
        secret = bytes.fromhex(key_secret)
    except ValueError:
        secret = b""
    if len(secret) < 16:
        raise SettingsError("MILLSTREAM_KEY_SECRET must be at least 32 hex digits; `openssl rand -hex 32` makes some")
    return secret


def key_hmac(secret: bytes, key: str) -> str:
    """What `Credential.hmac` holds of a key: hex HMAC-SHA256 of the whole key."""
    return hmac.new(secret, key.encode(), hashlib.sha256).hexdigest()


def key_id_of(key: str) -> str | None:
    """The id in `sk-ms-<key_id>-<secret>`, which holds no dash; None for what isn't a key of ours."""
    if not key.startswith(PREFIX) or len(key) > MAX_KEY_LENGTH:
        return None
    key_id, _, secret = key[len(PREFIX) :].partition("-")
    return key_id if key_id and secret else None


class Authenticator:
    """Authorization header → Credential."""

    def __init__(self, cache: Cache, secret: bytes, max_age_ms: int) -> None:
        """`max_age_ms`: a cache not checked against the log for longer refuses all: it may hold a revoked key."""
        self._cache = cache
        self._secret = secret
        self._max_age_ms = max_age_ms

    def authenticate(self, authorization: str | None) -> Credential:
        """The credential of a header's key. ApiError 401, or 503 while the cache is too old to tell."""
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise bad_key(_NO_KEY)
        if self._cache.age_ms > self._max_age_ms:
            raise unavailable("Keys can't be checked just now; try again.", retry_after_s=5)
        found = self._cache.items.get(key_id_of(key) or "")
        # Compared even if there is none of this id, so that time doesn't tell which ids exist.
        wanted = found.hmac if found is not None else key_hmac(self._secret, "")
        good = hmac.compare_digest(key_hmac(self._secret, key).encode(), wanted.encode())
        if found is None or not good:
            raise bad_key(_WRONG_KEY)
        if found.revoked_ms is not None:
            raise bad_key(_REVOKED)
        return found
