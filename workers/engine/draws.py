"""Random numbers that are keyed, not drawn in turn: the same (seed, choice, position) gives the same number (R8).

Philox4x64-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011).
"""

from __future__ import annotations

_WORD = (1 << 64) - 1
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_ROUNDS = 10


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Four 64-bit words of a 128-bit key and a 256-bit counter."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> 64) ^ c1 ^ k0, second & _WORD, (first >> 64) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) for a token; any whole seed is good, those from −2⁶⁴ to 2⁶⁴ − 1 are all different."""
    word = philox((seed & _WORD, (seed >> 64) & _WORD), (position, choice, 0, 0))[0]
    return (word >> 11) / (1 << 53)
