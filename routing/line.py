"""A straight line, fitted online. Without numpy, which no worker's I/O process should have to load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A weighted least-squares line through points (x, y), as its sums."""

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def fade(self, factor: float) -> Line:
        """The same points, counting less."""
        return Line(w=self.w * factor, x=self.x * factor, y=self.y * factor, xx=self.xx * factor, xy=self.xy * factor)

    def add(self, x: float, y: float, w: float = 1.0) -> Line:
        """One more point."""
        return Line(w=self.w + w, x=self.x + w * x, y=self.y + w * y, xx=self.xx + w * x * x, xy=self.xy + w * x * y)

    def fit(self) -> tuple[float, float]:
        """Where it begins, and how it rises. Its points must have two different x."""
        spread = self.w * self.xx - self.x * self.x
        slope = (self.w * self.xy - self.x * self.y) / spread
        return (self.y - slope * self.x) / self.w, slope


NO_POINTS = Line()
