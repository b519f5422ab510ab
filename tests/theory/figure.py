"""The figure of docs/speculative-decoding.md, drawn from the numbers: an SVG file."""

from lab.palette import DRAFTER, TARGET, VERDICT
from tests.theory.numbers import FIGURE_P, FIGURE_Q, ROOT

PATH = ROOT / "docs" / "figures" / "correction.svg"

WIDTH, HEIGHT = 640, 330
LEFT, BASE, SCALE = 50, 270, 480  # pixels; SCALE is the height of probability one
GROUP, BAR = 115, 34
# Green is what the drafter and the target have both, as accepted drafts are in every picture.
ALIKE, MISSING, SURPLUS = DRAFTER, TARGET, VERDICT


def figure() -> str:
    """The whole file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        "<title>Accepted drafts, rejected drafts and what corrects them</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        *_legend(),
    ]
    for index, (p, q) in enumerate(zip(FIGURE_P, FIGURE_Q, strict=True)):
        x = LEFT + index * GROUP
        alike = min(p, q)
        parts += [
            *_bar(x, "q", float(alike), float(q - alike), SURPLUS),
            *_bar(x + BAR + 6, "p", float(alike), float(p - alike), MISSING),
            _text(x + BAR + 3, BASE + 36, "ABCDE"[index], size=15),
        ]
    right = LEFT + 5 * GROUP - 20
    parts.append(f'<path d="M{LEFT - 15} {BASE}H{right}" stroke="black" fill="none"/>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(x: int, name: str, alike: float, more: float, colour: str) -> list[str]:
    """A bar of two parts: what p and q have both, and what only this one has."""
    drawn = [_box(x, BASE - alike * SCALE, alike * SCALE, ALIKE)]
    if more > 0:
        drawn.append(_box(x, BASE - (alike + more) * SCALE, more * SCALE, colour))
    top = BASE - (alike + more) * SCALE
    label = _text(x + BAR / 2, top - 6, f"{alike + more:.2f}", size=11)
    return [*drawn, label, _text(x + BAR / 2, BASE + 16, name)]


def _legend() -> list[str]:
    words = (
        (ALIKE, "min(p, q): drafted and accepted"),
        (SURPLUS, "(q - p)+: drafted and rejected"),
        (MISSING, "(p - q)+: what a correction is drawn from"),
    )
    parts = []
    for index, (colour, line) in enumerate(words):
        y = 18 + 22 * index
        parts.append(
            f'<rect x="330" y="{y}" width="14" height="14" fill="{colour}" stroke="black"/>'
        )
        parts.append(f'<text x="352" y="{y + 12}">{line}</text>')
    return parts


def _box(x: float, y: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" '
        f'fill="{colour}" stroke="black"/>'
    )


def _text(x: float, y: float, text: str, *, size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:.1f}" font-size="{size}" text-anchor="middle">{text}</text>'
