"""Names of fleets."""

from __future__ import annotations

import pytest

from wire.fleet import BadFleet, Fleet, slug_of


def test_a_name_parses_back() -> None:
    fleet = Fleet("eu-west", "gpu", "llama-3", "1", "bf16_a")
    assert fleet.name == "eu-west.gpu.llama-3.1.bf16_a"
    assert Fleet.parse(fleet.name) == fleet


@pytest.mark.parametrize(
    "name", ["a.b.c.d", "a.b.c.d.e.f", "a.b.c.d.", "a.b..d.e", "A.b.c.d.e", "a.b.c.d.e\n", "-a.b.c.d.e"]
)
def test_what_could_not_be_a_topic_name_is_refused(name: str) -> None:
    with pytest.raises(BadFleet):
        Fleet.parse(name)


@pytest.mark.parametrize(
    ("model", "slug"),
    [
        ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("meta/Llama 3.1", "meta-llama-3-1"),
        ("a/../b", "a-b"),
        ("..", "model"),
    ],
)
def test_a_public_name_becomes_a_slug_that_fits(model: str, slug: str) -> None:
    assert slug_of(model) == slug
    assert Fleet("local", "cpu", slug, "1", "sim").slug == slug
