"""Draws docs/assets/serving.svg, the chart of the README: `python -m docs.chart`. The numbers are those of the table
"beside Triton" of `benchmarks/serving/results.json`: the best of Triton's configurations for each mix.
"""

from pathlib import Path

from testing import results

RESULTS = Path(__file__).parents[1] / "benchmarks" / "serving" / results.NAME
PICTURE = Path(__file__).parent / "assets" / "serving.svg"
SERVERS = (("Triton, its best configuration", "#8c959f"), ("Gangway", "#0969da"))
NAMES = {
    "light .35": "light at .35",
    "medium .45": "medium at .45",
    "heavy .45": "heavy at .45",
    "mix .35": "all seven at .35",
}
LEFT, TOP, BAR_HEIGHT, GAP, WIDTH_OF_100 = 150, 62, 20, 22, 640


def shares_in_time() -> dict[str, tuple[float, float]]:
    """Return, by mix, per cent of the worst model's requests within 3 x its latency alone: Triton's, and ours."""
    table = results.read(RESULTS)["beside Triton"]
    per_cent = {mix: [float(cell.partition(" %")[0]) for cell in cells if cell] for mix, *cells in table.rows}
    return {NAMES[mix]: (max(theirs), ours) for mix, (*theirs, ours) in per_cent.items()}


def svg() -> str:
    """Return the picture. It has a light card behind it, so that it can be read on any background."""
    shares_by_mix = shares_in_time()
    height = TOP + len(shares_by_mix) * (2 * BAR_HEIGHT + GAP) + 34
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
    for mix, shares in shares_by_mix.items():
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
