"""The result as a picture: latencies of a run, and shares in time over the rate. Imports matplotlib."""

from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gangway.clients.perf.measure import Goal, Run, Session

COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6a4c93", "#00798c", "#8d5524", "#555555")


def save_picture(path: Path, session: Session, run: Run, goal: Goal | None) -> None:
    """Write a PNG: latencies of this run, and of a search the shares of all. Raises OSError."""
    searched = goal is not None and len(session.runs) > 1
    figure = Figure(figsize=(12 if searched else 7, 4.5), layout="constrained")
    axes = figure.subplots(1, 2 if searched else 1, squeeze=False)[0]
    _latencies(axes[0], run, session)
    if goal is not None and searched:
        _shares(axes[1], session, goal)
    figure.savefig(path, dpi=120, format="png")


def _latencies(axes: Axes, run: Run, session: Session) -> None:
    """Draw the distribution of each model's latency; dotted lines are targets."""
    for index, name in enumerate(run.outcomes.names):
        chosen = (run.outcomes.models == index) & run.outcomes.answered
        values = np.sort(run.outcomes.latency_us[chosen]) / 1000
        colour = COLOURS[index % len(COLOURS)]
        if values.size:
            axes.step(values, np.arange(1, values.size + 1) / values.size, where="post", color=colour, label=name)
        for targets in session.workload.targets_us.values():
            if (target := targets[index]) is not None:
                axes.axvline(target / 1000, color=colour, linestyle=":", linewidth=1)
    rate = "" if run.rate_per_s is None else f" at {run.rate_per_s:.3g} queries/s"
    axes.set(xscale="log", xlabel="latency from the scheduled arrival, ms", ylabel="share of answers", ylim=(0, 1.01))
    axes.set_title(f"mix {session.workload.mix.name}{rate}; dotted: targets")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _shares(axes: Axes, session: Session, goal: Goal) -> None:
    """Draw a dot for each run, and a line through the mean of each rate."""
    by_rate = defaultdict(list)
    for run in session.runs:
        by_rate[run.rate_per_s or 0.0].append(run.summary)
    for index, label in enumerate(session.workload.targets_us):
        shares = {rate: [goal.share_of(summary, label) for summary in by_rate[rate]] for rate in sorted(by_rate)}
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(list(shares), [fmean(each) for each in shares.values()], color=colour, label=label)
        for rate, each in shares.items():
            axes.plot([rate] * len(each), each, "o", color=colour, markersize=4)
    axes.axhline(goal.share, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="rate, queries/s", ylabel="share in time", ylim=(0, 1.02))
    axes.set_title(f"{'the worst model' if goal.each else 'all queries'}; dashed: goal")
    axes.grid(alpha=0.3)
    axes.legend(title="within", fontsize="small")
