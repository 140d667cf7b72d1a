"""Charts as SVG text: lines over a number, bars over names. No library: two kinds of chart don't earn one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 900, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 160, 40, 64
_INK, _GRID = "#333", "#ddd"
_COLOURS = ("#0b6e99", "#d1495b", "#2e8b57", "#edae49", "#6f4e7c", "#8d6b3f", "#7a7a7a", "#1f3a5f")
Points = Sequence[tuple[float, float]]


def lines(title: str, series: Mapping[str, Points], *, x: str, y: str, top: float | None = None) -> str:
    """A line for each series. The vertical axis begins at 0."""
    xs = [point[0] for points in series.values() for point in points]
    frame = _Frame(min(xs), max(xs), top or max(point[1] for points in series.values() for point in points))
    body = []
    for number, (name, points) in enumerate(series.items()):
        path = " ".join(f"{frame.x(at):.1f},{frame.y(value):.1f}" for at, value in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="1.6"/>')
        body.append(_legend(number, name))
    ticks = [_text(frame.x(at), HEIGHT - _BOTTOM + 18, f"{at:g}", "middle") for at in _round_steps(*frame.span)]
    return _chart(title, frame, x, y, [*ticks, *body])


def bars(title: str, values: Mapping[str, Mapping[str, float]], *, y: str, top: float | None = None) -> str:
    """A group of bars for each name, a bar for each series in it. A name is broken at its commas."""
    names = list(dict.fromkeys(name for group in values.values() for name in group))
    frame = _Frame(0, len(values), top or max(value for group in values.values() for value in group.values()))
    body = [_legend(number, name) for number, name in enumerate(names)]
    for place, (label, group) in enumerate(values.items()):
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            if name in group:
                body.append(_bar(frame, place + 0.1 + number * width, width, group[name], number))
        body += [
            _text(frame.x(place + 0.5), HEIGHT - _BOTTOM + 16 + 14 * line, words, "middle")
            for line, words in enumerate(label.split(", "))
        ]
    return _chart(title, frame, "", y, body)


class _Frame:
    """Where a value is on the sheet."""

    def __init__(self, first: float, last: float, top: float) -> None:
        self.span = first, last
        self.top = top or 1.0

    def x(self, at: float) -> float:
        first, last = self.span
        return _LEFT + (at - first) / ((last - first) or 1) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - min(value / self.top, 1.0) * (HEIGHT - _TOP - _BOTTOM)


def _chart(title: str, frame: _Frame, x: str, y: str, body: list[str]) -> str:
    grid = []
    for value in _round_steps(0, frame.top):
        height = frame.y(value)
        grid.append(f'<path d="M{_LEFT} {height:.1f}H{WIDTH - _RIGHT}" stroke="{_GRID}"/>')
        grid.append(_text(_LEFT - 8, height + 4, f"{value:g}", "end"))
    middle = (_TOP + HEIGHT - _BOTTOM) / 2
    labels = [
        f'<text x="{_LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 10, x, "middle"),
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(y)}</text>',
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{_INK}"><rect width="100%" height="100%" fill="#fff"/>'
    )
    return "\n".join([head, *grid, *labels, *body, "</svg>"]) + "\n"


def _bar(frame: _Frame, at: float, width: float, value: float, number: int) -> str:
    left, right, top = frame.x(at), frame.x(at + width), frame.y(value)
    size = f'width="{right - left - 1:.1f}" height="{frame.y(0) - top:.1f}"'
    return f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{_colour(number)}"/>'


def _legend(number: int, name: str) -> str:
    left, height = WIDTH - _RIGHT + 14, _TOP + 8 + number * 18
    box = f'<rect x="{left}" y="{height - 9}" width="11" height="11" fill="{_colour(number)}"/>'
    return box + _text(left + 17, height + 1, name, "start")


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _round_steps(first: float, last: float) -> list[float]:
    """About five round numbers between two."""
    rough = (last - first) / 5 or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
    return [round(step * place, 10) for place in range(math.ceil(first / step), math.floor(last / step + 1e-9) + 1)]
