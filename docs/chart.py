"""Draws docs/assets/serving.svg, the chart of the README: `python -m docs.chart`. The numbers are those of the page
docs/measurements/serving.md, section "Triton at the same rates": the best of Triton's configurations for each mix.
"""

from pathlib import Path

PICTURE = Path(__file__).parent / "assets" / "serving.svg"
SERVERS = (("Triton, its best configuration", "#8c959f"), ("Gangway", "#0969da"))
# Mix and its share of the machine's capacity -> per cent of the worst model's requests within 3 x its latency alone.
RESULTS = {
    "light at .35": (76.3, 95.7),
    "medium at .45": (81.5, 97.0),
    "heavy at .45": (97.3, 100.0),
    "all seven at .35": (71.4, 98.4),
}
LEFT, TOP, BAR_HEIGHT, GAP, WIDTH_OF_100 = 150, 62, 20, 22, 640


def svg() -> str:
    """Return the picture. It has a light card behind it, so that it can be read on any background."""
    height = TOP + len(RESULTS) * (2 * BAR_HEIGHT + GAP) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 {height}" font-family="Helvetica, Arial, sans-serif"'
        ' font-size="13" role="img">',
        "<title>Requests in time: share of the worst model of each mix, Triton and Gangway</title>",
        f'<rect x="1" y="1" width="918" height="{height - 2}" rx="10" fill="#f6f8fa" stroke="#d0d7de"/>',
    ]
    for number, (server, colour) in enumerate(SERVERS):
        parts += [
            f'<rect x="{LEFT + 280 * number}" y="22" width="14" height="14" fill="{colour}"/>',
            f'<text x="{LEFT + 20 + 280 * number}" y="34" fill="#1f2328">{server}</text>',
        ]
    y = TOP
    for mix, shares in RESULTS.items():
        parts.append(f'<text x="{LEFT - 12}" y="{y + BAR_HEIGHT + 4}" text-anchor="end" fill="#1f2328">{mix}</text>')
        for (_, colour), share in zip(SERVERS, shares, strict=True):
            width = share * WIDTH_OF_100 / 100
            parts += [
                f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR_HEIGHT - 2}" fill="{colour}"/>',
                f'<text x="{LEFT + width + 8:.0f}" y="{y + 14}" fill="#1f2328">{share:g} %</text>',
            ]
            y += BAR_HEIGHT
        y += GAP
    goal = LEFT + 0.95 * WIDTH_OF_100
    parts += [
        f'<path d="M{goal:.0f} {TOP - 8}V{y - GAP + 6}" stroke="#cf222e" stroke-dasharray="4 3"/>',
        f'<text x="{goal:.0f}" y="{y}" text-anchor="middle" fill="#cf222e">goal: 95 %</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(svg())
