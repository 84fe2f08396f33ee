"""Draws docs/assets/model-life.svg, the states of a model's version: `python -m docs.life_drawing`.

Each arrow is an entry of the table in `server/control/supervisor/model_life.py`.
"""

import math
from pathlib import Path

from gangway.server.control.supervisor.model_life import TRANSITIONS, VersionState

PICTURE = Path(__file__).parent / "assets" / "model-life.svg"
# Centres of the boxes.
PLACES = {
    VersionState.ABSENT: (110, 240),
    VersionState.UNKNOWN: (110, 70),
    VersionState.LOADING: (400, 70),
    VersionState.READY: (760, 70),
    VersionState.UNLOADING: (760, 270),
    VersionState.UNLOADED: (620, 440),
    VersionState.FAILED: (280, 440),
}
COLOURS = {VersionState.READY: "#2f7d4f", VersionState.FAILED: "#b3372f", VersionState.LOADING: "#0969da"}
GREY = "#6b7684"
WIDTH, HEIGHT = 126, 46
BEND = 26  # how far a curve is from the straight line


def svg() -> str:
    """Return the picture. It has a light card behind it, so that it can be read on any background."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 520" font-family="Helvetica, Arial, sans-serif"'
        ' font-size="14" role="img">',
        "<title>The states of a model's version, and what may follow each</title>",
        '<rect x="1" y="1" width="878" height="518" rx="10" fill="#f6f8fa" stroke="#d0d7de"/>',
        "<defs>",
        *(_head(state) for state in VersionState),
        "</defs>",
    ]
    for before, all_after in TRANSITIONS.items():
        for after, why in all_after.items():
            curve = _loop(before) if before is after else _curve(before, after)
            colour = COLOURS.get(after, GREY)
            parts.append(
                f'<path id="{before.value}-{after.value}" d="{curve}" fill="none" stroke="{colour}" stroke-width="1.5"'
                f' marker-end="url(#{after.value})"><title>{before.value} to {after.value}: {why}</title></path>'
            )
    for state, (x, y) in PLACES.items():
        colour = COLOURS.get(state, GREY)
        parts += [
            f'<rect x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" height="{HEIGHT}" rx="8"'
            f' fill="#ffffff" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-weight="bold" fill="#1f2328">{state.name}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _head(state: VersionState) -> str:
    return (
        f'<marker id="{state.value}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"'
        f' orient="auto"><path d="M0 0L10 5L0 10z" fill="{COLOURS.get(state, GREY)}"/></marker>'
    )


def _curve(before: VersionState, after: VersionState) -> str:
    """Return the way from box to box, bent to its own left, so that there and back are two lines."""
    (x1, y1), (x2, y2) = PLACES[before], PLACES[after]
    length = math.hypot(x2 - x1, y2 - y1)
    middle = ((x1 + x2) / 2 + BEND * (y2 - y1) / length, (y1 + y2) / 2 - BEND * (x2 - x1) / length)
    begin, end = _border((x1, y1), middle), _border((x2, y2), middle)
    return f"M{begin[0]:.0f} {begin[1]:.0f}Q{middle[0]:.0f} {middle[1]:.0f} {end[0]:.0f} {end[1]:.0f}"


def _border(centre: tuple[float, float], towards: tuple[float, float]) -> tuple[float, float]:
    """Return where the line from a box's centre to a point leaves it."""
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    scale = min(WIDTH / 2 / abs(dx) if dx else math.inf, HEIGHT / 2 / abs(dy) if dy else math.inf)
    return centre[0] + dx * scale, centre[1] + dy * scale


def _loop(state: VersionState) -> str:
    """Return an ear, above the box in the upper half and below it in the lower one."""
    x, y = PLACES[state]
    side = -1 if y < 200 else 1
    edge = y + side * HEIGHT / 2
    return f"M{x + 15:g} {edge:g}C{x + 60:g} {edge + side * 38:g} {x - 60:g} {edge + side * 38:g} {x - 15:g} {edge:g}"


if __name__ == "__main__":
    PICTURE.write_text(svg())
