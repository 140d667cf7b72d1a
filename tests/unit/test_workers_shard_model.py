"""The shard's state machine against everything that can happen to it (R1 to R7)."""

from __future__ import annotations

import random

import pytest
from shard_world import World


@pytest.mark.parametrize("block", range(20))
def test_no_token_is_lost_doubled_or_changed_whatever_dies(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        world = World(random.Random(seed))
        try:
            for _ in range(220):
                world.step()
            world.settle()
            world.check_settled()
        except AssertionError as exc:
            raise AssertionError(f"seed {seed}: {exc}") from exc
