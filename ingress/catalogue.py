"""Which models there are, which version a request gets, and on which shards it may run. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import mmh3

from ingress.errors import model_not_found, unavailable
from ingress.life import Target
from wire.fleet import BadFleet, Fleet
from wire.messages import Credential, Model, ModelVersion


def visible(models: Iterable[Model], credential: Credential) -> list[Model]:
    """The models a key may use, by name."""
    allowed = credential.limits.models
    return sorted((m for m in models if m.versions and (not allowed or m.name in allowed)), key=lambda m: m.name)


def find(models: Mapping[str, Model], name: str, credential: Credential) -> Model:
    """The model of a public name; ApiError 404 if there is none, or not for this key."""
    model = models.get(name)
    if model is None or not visible([model], credential):
        raise model_not_found(name)
    return model


def version_of(model: Model, request_id: str) -> ModelVersion:
    """The version a request gets: by share, and the same each time for the same request."""
    point = mmh3.hash(f"{model.name}\0{request_id}", signed=False) / 2**32 * sum(v.share for v in model.versions)
    for version in model.versions:
        point -= version.share
        if point < 0:
            return version
    return model.versions[-1]


def targets(model: Model, version: ModelVersion, regions: tuple[str, ...]) -> tuple[Target, ...]:
    """Every shard that a request of this version may go to; `regions`: where it may.

    ApiError 503 for a catalogue entry that names no possible fleet: the operator's mistake, not the client's.
    """
    try:
        found = _targets(model.slug, version, regions)
    except BadFleet as exc:
        raise unavailable(f"The model '{model.name}' is not set up right: {exc}.", retry_after_s=60) from exc
    if not found:
        raise unavailable(f"The model '{model.name}' isn't served where this request may go.", retry_after_s=60)
    return found


@lru_cache(maxsize=256)
def _targets(slug: str, version: ModelVersion, regions: tuple[str, ...]) -> tuple[Target, ...]:
    """The same tuple for the same fleets, so that the policy knows them again.

    In their own order, which a replay finds again whatever the settings and the catalogue were: draws go by it.
    """
    return tuple(
        sorted(
            Target(Fleet(where, pool, slug, version.version, version.numerics), shard)
            for where in regions
            if where in version.regions
            for pool in version.pools
            for shard in range(version.shards)
        )
    )


def shown(model: Model) -> dict[str, Any]:
    """OpenAI's model object. `root` and `max_model_len` are what `vllm bench` and its kind look for."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_ms // 1_000,
        "owned_by": model.owned_by,
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_tokens,
    }
