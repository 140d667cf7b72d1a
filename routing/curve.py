"""Latency against load: the curve that one engine has, and how a group of engines shares its load best.

An engine that gives a part x·P of its time to prompts and decodes in steps of d₀ + s·n for n choices has, with answers
of L tokens, n = x·L·(d₀ + s·n) ÷ (1 − x·P) of them at once. So a request takes

    base + scale ÷ (1 − x ÷ capacity),  base = P, scale = L·d₀, capacity = 1 ÷ (P + L·s)

which is convex, with a pole at the capacity that prefill and decode have together: 1/capacity = 1/prefill + 1/decode.
With base 0 and scale 1/capacity it is the queue's 1 ÷ (capacity − x).

The load of a group is shared best where one more request costs the same at every engine that has any (Kuhn, Tucker):
p = base + scale ÷ (1 − x/capacity)². That cost is found by false position (the Illinois rule), for all groups and
several loads at once, and in w = 1 ÷ √(p − the least base): there the load of engines that have one base is a straight
line, so that one step finds it, and that of others nearly is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EXACT = 1e-12
"""Of a group's capacity: so near to the load that is asked for is near enough"""
STEPS = 100
"""At most; four are enough for engines that are alike, twenty for most others"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One engine's latency in ms against its load in requests a second."""

    base_ms: float
    """what load doesn't change"""
    scale_ms: float
    """what it does, without any load; positive"""
    capacity: float
    """requests a second; positive"""

    def ms(self, load: float) -> float:
        """A request's latency; infinite from the capacity on."""
        if load >= self.capacity:
            return float("inf")
        return self.base_ms + self.scale_ms / (1 - load / self.capacity)

    def spent_ms(self, load: float, headroom: float) -> float:
        """What all its requests take in a second, in ms: finite at any load, as one more than there is headroom for
        costs what the last one did."""
        most = headroom * self.capacity
        if load <= most:
            return load * self.ms(load)
        return most * self.ms(most) + (load - most) * (self.base_ms + self.scale_ms / (1 - headroom) ** 2)


class Curves:
    """The engines of all groups. Loads have a row for each case that is asked, and a column for each group."""

    def __init__(self, groups: list[list[Curve]], headroom: float) -> None:
        """`headroom`: the share of its capacity that an engine may have for its load, below 1."""
        engines = [curve for group in groups for curve in group]
        self._starts = np.cumsum([0, *(len(group) for group in groups[:-1])])
        self._owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self._base = np.array([curve.base_ms for curve in engines])
        self._scale = np.array([curve.scale_ms for curve in engines])
        self._capacity = np.array([curve.capacity for curve in engines])
        self._headroom = headroom
        self.capacity: Floats = self._sum(self._capacity) * headroom
        """of each group, headroom off"""
        least = np.minimum.reduceat(self._base + self._scale, self._starts)
        self._most = np.maximum.reduceat(self._base + self._scale / (1 - headroom) ** 2, self._starts)
        self._floor = np.minimum.reduceat(self._base, self._starts)
        self._cheap, self._dear = 1 / np.sqrt(least - self._floor), 1 / np.sqrt(self._most - self._floor)
        self._exact = EXACT * self._sum(self._capacity)

    @property
    def most_ms(self) -> float:
        """What one more request costs at the fullest engine that may be."""
        return float(self._most.max())

    def share(self, loads: Floats) -> Floats:
        """Each engine's part of its group's load (cases × engines)."""
        return self._loads(self._price(loads))

    def cost(self, loads: Floats) -> tuple[Floats, Floats]:
        """What the groups' requests take in all, in ms a second, and by how much one more would raise it: an array each
        (cases × groups)."""
        price = self._price(loads)
        mine = self._loads(price)
        latency = self._base + self._scale / (1 - mine / self._capacity)
        return self._sum(mine * latency), price

    def _price(self, loads: Floats) -> Floats:
        """What one more request costs where each group is loaded so."""
        dear, cheap = np.broadcast_to(self._dear, loads.shape), np.broadcast_to(self._cheap, loads.shape)
        over, under = self.capacity - loads, -loads
        side = np.zeros(loads.shape)
        for _ in range(STEPS):
            w = (dear * under - cheap * over) / (under - over)
            off = self._sum(self._loads(self._floor + 1 / (w * w))) - loads
            now = np.where(np.abs(off) > self._exact, np.sign(off), 0)
            if not now.any():
                break
            high, low, again = now > 0, now < 0, now == side
            over = np.where(high, off, np.where(low & again, over / 2, over))
            under = np.where(low, off, np.where(high & again, under / 2, under))
            dear, cheap, side = np.where(high, w, dear), np.where(low, w, cheap), now
        price: Floats = self._floor + 1 / (w * w)
        return price

    def _loads(self, price: Floats) -> Floats:
        """Each engine's load where one more request costs so much: the inverse of base + scale ÷ (1 − x/capacity)²."""
        over = np.maximum(price[..., self._owners] - self._base, self._scale)
        loads: Floats = np.minimum(self._capacity * (1 - np.sqrt(self._scale / over)), self._capacity * self._headroom)
        return loads

    def _sum(self, engines: Floats) -> Floats:
        """By group."""
        total: Floats = np.add.reduceat(engines, self._starts, axis=-1)
        return total
