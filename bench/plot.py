"""Plots as SVG, of bars and of lines: no more than a person needs to compare figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

WIDTH = 900
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
INK, GREY, PALE, MARK = "#222222", "#666666", "#dddddd", "#d00000"
BAR, GAP = 18, 12
BARS_LEFT, BARS_RIGHT = 230, WIDTH - 110
LINES_LEFT, LINES_RIGHT, LINES_HEIGHT = 90, WIDTH - 40, 300

# Median, least, greatest.
Spread = tuple[float, float, float]


@dataclass(frozen=True)
class Bars:
    """For each thing a bar of each series, and a line from least to greatest; `mark` is to compare with."""

    title: str
    unit: str
    series: Mapping[str, Mapping[str, Spread]]
    mark: float | None = None

    def draw(self, top: float) -> tuple[list[str], float]:
        """Give the drawing, from here down, and where it ends."""
        names = list(dict.fromkeys(name for bars in self.series.values() for name in bars))
        greatest = [spread[2] for bars in self.series.values() for spread in bars.values()]
        scale = _Scale([*greatest, self.mark or 0], BARS_LEFT, BARS_RIGHT)
        parts, top = _heading(self.title, self.series, top)
        y = top
        for name in names:
            y += GAP / 2
            bars = [
                (colour, bars[name])
                for colour, bars in zip(COLOURS, self.series.values(), strict=False)
                if name in bars
            ]
            parts.append(_text(BARS_LEFT - 8, y + BAR * len(bars) / 2 + 4, name, anchor="end"))
            for colour, (middle, least, most) in bars:
                parts += [
                    _rectangle(BARS_LEFT, y + 1, scale.at(middle) - BARS_LEFT, BAR - 2, colour),
                    _line(scale.at(least), y + BAR / 2, scale.at(most), y + BAR / 2, INK, 2),
                    _text(scale.at(most) + 6, y + BAR / 2 + 4, _number(middle), anchor="start"),
                ]
                y += BAR
            y += GAP / 2
        for tick in scale.ticks:
            parts.insert(0, _line(scale.at(tick), top, scale.at(tick), y, PALE))
            parts.append(_text(scale.at(tick), y + 16, _number(tick)))
        parts.append(_line(BARS_LEFT, y, BARS_RIGHT, y, INK))
        if self.mark is not None:
            parts.append(_line(scale.at(self.mark), top, scale.at(self.mark), y, MARK, 2))
        parts.append(_text((BARS_LEFT + BARS_RIGHT) / 2, y + 36, self.unit))
        return parts, y + 56


@dataclass(frozen=True)
class Lines:
    """A line for each series, on axes that begin at zero."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]

    def draw(self, top: float) -> tuple[list[str], float]:
        """Give the drawing, from here down, and where it ends."""
        parts, top = _heading(self.title, self.series, top)
        bottom = top + LINES_HEIGHT
        points = [point for line in self.series.values() for point in line]
        across = _Scale([x for x, _ in points], LINES_LEFT, LINES_RIGHT)
        up = _Scale([y for _, y in points], bottom, top + 10)
        for tick in up.ticks:
            parts += [
                _line(LINES_LEFT, up.at(tick), LINES_RIGHT, up.at(tick), PALE),
                _text(LINES_LEFT - 8, up.at(tick) + 4, _number(tick), anchor="end"),
            ]
        parts += [_text(across.at(tick), bottom + 16, _number(tick)) for tick in across.ticks]
        for colour, line in zip(COLOURS, self.series.values(), strict=False):
            places = [(across.at(x), up.at(y)) for x, y in line]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(_element("polyline", points=path, fill="none", stroke=colour, stroke_width=2.5))
            parts += [_element("circle", cx=x, cy=y, r=3.5, fill=colour) for x, y in places]
        middle = top + LINES_HEIGHT / 2
        parts += [
            _line(LINES_LEFT, bottom, LINES_RIGHT, bottom, INK),
            _text((LINES_LEFT + LINES_RIGHT) / 2, bottom + 36, self.x_label),
            _text(24, middle, self.y_label, transform=f"rotate(-90 24 {middle:.1f})"),
        ]
        return parts, bottom + 56


def figure(charts: Sequence[Bars | Lines], note: str) -> str:
    """Draw charts one below the other, and say under them what they depend on."""
    parts: list[str] = []
    y = 10.0
    for chart in charts:
        drawn, y = chart.draw(y)
        parts += drawn
    parts.append(_text(14, y + 10, note, anchor="start", font_size=11, fill=GREY))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 26:.0f}" font-size="13"'
        f' font-family="DejaVu Sans, Verdana, sans-serif" fill="{INK}">\n'
        + "\n".join([_rectangle(0, 0, WIDTH, y + 26, "#ffffff"), *parts])
        + "\n</svg>\n"
    )


class _Scale:
    """From zero to the greatest value, with round ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        greatest = max([*values, 1e-9])
        power = 10.0 ** math.floor(math.log10(greatest / 5))
        step = next(power * n for n in (1, 2, 5, 10) if greatest / (power * n) <= 6)
        self.ticks = [step * n for n in range(math.floor(greatest / step + 1e-9) + 1)]
        self._start, self._factor = start, (end - start) / greatest

    def at(self, value: float) -> float:
        return self._start + value * self._factor


def _heading(title: str, series: Mapping[str, object], top: float) -> tuple[list[str], float]:
    parts = [_text(14, top + 18, title, anchor="start", font_size=17, font_weight="bold")]
    y = top + 34
    if len(series) > 1:
        x = 14.0
        for colour, name in zip(COLOURS, series, strict=False):
            parts += [_rectangle(x, y, 12, 12, colour), _text(x + 18, y + 11, name, anchor="start")]
            x += 44 + 7.6 * len(name)
        y += 24
    return parts, y


def _text(x: float, y: float, text: str, *, anchor: str = "middle", **more: str | float) -> str:
    return _element("text", text, x=x, y=y, text_anchor=anchor, **more)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return _element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width)


def _rectangle(x: float, y: float, width: float, height: float, colour: str) -> str:
    return _element("rect", x=x, y=y, width=width, height=height, fill=colour)


def _element(name: str, text: str = "", **attributes: str | float) -> str:
    said = "".join(
        f" {key.replace('_', '-')}={quoteattr(value if isinstance(value, str) else f'{value:.5g}')}"
        for key, value in attributes.items()
    )
    return f"<{name}{said}>{escape(text)}</{name}>" if text else f"<{name}{said}/>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
