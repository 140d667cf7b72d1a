"""The simulated engine is the mocker of ai-dynamo 1.6.1: round robin over 8 of them, on the whole Mooncake trace.

The figures are those of one run of the real one each. 5 % would count as the same; the polynomials are exact, so 1 %.
"""

from __future__ import annotations

import pytest

from millstream.bench import traces
from routing.simulator.peers.load import RoundRobin
from routing.simulator.run import simulate

# speed: TTFT p50, p99, TPOT p50, p99, hit, goodput
SEEN = {
    1.0: (184, 2048, 6.8, 22.8, 0.082, 0.980),
    3.0: (229, 2406, 13.4, 53.4, 0.082, 0.896),
    4.0: (274, 2781, 22.4, 100, 0.081, 0.574),
}


@pytest.mark.parametrize("speed", SEEN)
def test_round_robin_is_what_the_real_one_gives(speed: float) -> None:
    got = simulate(traces.mooncake(speed=speed), RoundRobin())
    figures = (got.ttft_p50_ms, got.ttft_p99_ms, got.tpot_p50_ms, got.tpot_p99_ms, got.hit, got.goodput)
    assert figures == pytest.approx(SEEN[speed], rel=0.01)
    assert got.requests == 12_031
    assert got.failed == got.shed == 0
