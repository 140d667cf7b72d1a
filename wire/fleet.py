"""A fleet: everything that is interchangeable, and so has one topic set and one consumer group each."""

from __future__ import annotations

import re

import msgspec

from wire.errors import WireError

_PART = re.compile(r"[a-z0-9][a-z0-9_-]*\Z")


class BadFleet(WireError, ValueError):
    """A part of a fleet's name holds what a topic name can't."""


class Fleet(msgspec.Struct, frozen=True, array_like=True, order=True):
    """(region, pool, model slug, version, numerics class). On the wire: an array in that order."""

    region: str
    pool: str
    slug: str
    version: str
    numerics: str

    def __post_init__(self) -> None:
        for part in (self.region, self.pool, self.slug, self.version, self.numerics):
            if not _PART.match(part):
                raise BadFleet(f"{part!r} can't be part of a fleet's name: use a-z, 0-9, - and _")

    @property
    def name(self) -> str:
        """region.pool.slug.version.numerics, as in topic and group names."""
        return ".".join((self.region, self.pool, self.slug, self.version, self.numerics))

    @classmethod
    def parse(cls, name: str) -> Fleet:
        """The fleet of a `name`; BadFleet if it isn't five good parts."""
        parts = name.split(".")
        if len(parts) != 5:
            raise BadFleet(f"{name!r} isn't region.pool.slug.version.numerics")
        return cls(*parts)


def slug_of(model: str) -> str:
    """A model's public name as a topic part: lower case, everything else a dash."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") or "model"
