"""`python deploy/compose/dashboard.py`: write grafana/dashboards/gangway.json.

The tables below are the dashboard; Grafana's own library makes its JSON. Every query stays within the variables
`instance` and `model`. `tests/deploy` asks each of them of a live Prometheus.
"""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)

TARGET: Final = Path(__file__).parent / "grafana" / "dashboards" / "gangway.json"
SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH: Final = 24  # of a dashboard, in Grafana's columns
GOOD, DOUBTFUL, BAD = "green", "orange", "red"


class Query(NamedTuple):
    """What is asked of Prometheus, and the name of the lines in the legend."""

    expr: str
    legend: str


class Chart(NamedTuple):
    """Lines over time; `unit` is one of Grafana's names."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    most: float | None = None  # of the axis


class Figure(NamedTuple):
    """One number, coloured from each step on."""

    title: str
    description: str
    unit: str
    expr: str
    steps: Sequence[tuple[float | None, str]] = ((None, GOOD),)


SERVER: Final = '{instance=~"$instance"}'
MODEL: Final = '{instance=~"$instance",model=~"$model"}'


def rate(metric: str, labels: str = MODEL) -> str:
    """How fast a counter grows, by series."""
    return f"rate({metric}{labels}[$__rate_interval])"


def by_model(metric: str) -> str:
    """How fast a counter grows, by model."""
    return f"sum by (model) ({rate(metric)})"


def quantile(share: float, metric: str) -> str:
    """A quantile of a histogram, by model."""
    return f"histogram_quantile({share}, sum by (le, model) ({rate(f'{metric}_bucket')}))"


MET, MISSED = "gangway_qos_met_total", "gangway_qos_missed_total"

FIGURES: Final = (
    Figure("Servers", "That answer Prometheus", "short", f"count(gangway_build_info{SERVER})"),
    Figure("Requests", "Answered", "reqps", f"sum({rate('nv_inference_request_success')})"),
    Figure(
        "In time",
        "Of the requests with a latency target",
        "percentunit",
        f"sum({rate(MET)}) / (sum({rate(MET)}) + sum({rate(MISSED)}))",
        ((None, BAD), (0.9, DOUBTFUL), (0.95, GOOD)),
    ),
    Figure(
        "Cores busy",
        "Share of the cores' time in gangs",
        "percentunit",
        f"sum({rate('gangway_core_busy_seconds_total', SERVER)}) / sum(gangway_cores{SERVER})",
        ((None, GOOD), (0.8, DOUBTFUL), (0.95, BAD)),
    ),
    Figure(
        "Rejected",
        "Requests answered UNAVAILABLE",
        "reqps",
        f"sum({rate('gangway_requests_refused_total')}) + sum({rate('gangway_calls_refused_unread_total', SERVER)})",
        ((None, GOOD), (0.1, DOUBTFUL), (1, BAD)),
    ),
    Figure(
        "Processes replaced",
        "In the last hour",
        "short",
        f"sum(increase(gangway_process_restarts_total{SERVER}[1h]))",
        ((None, GOOD), (0.5, BAD)),
    ),
)

ROWS: Final = {
    "Models": (
        Chart("Requests", "Answered", "reqps", [Query(by_model("nv_inference_request_success"), "{{model}}")]),
        Chart(
            "In time",
            "Share of the requests with a latency target. The others have none and do not count",
            "percentunit",
            [Query(f"{by_model(MET)} / ({by_model(MET)} + {by_model(MISSED)})", "{{model}}")],
            1.0,
        ),
        Chart(
            "Latency",
            "From arrival to answer in the server",
            "s",
            [
                Query(quantile(share, "gangway_request_duration_seconds"), f"{{{{model}}}} {share:.0%}")
                for share in (0.5, 0.99)
            ],
        ),
        Chart(
            "Waiting, 99 %",
            "From arrival to the first task: what other requests cost this one",
            "s",
            [Query(quantile(0.99, "gangway_queue_duration_seconds"), "{{model}}")],
        ),
        Chart(
            "Computing, 99 %",
            "From the first task to the last, stops included",
            "s",
            [Query(quantile(0.99, "gangway_compute_duration_seconds"), "{{model}}")],
        ),
        Chart(
            "Rows per batch",
            "Mean",
            "short",
            [Query(f"{by_model('gangway_batch_rows_sum')} / {by_model('gangway_batch_rows_count')}", "{{model}}")],
        ),
        Chart(
            "Rejected",
            "Answered UNAVAILABLE: late, or a queue or the server is full",
            "reqps",
            [
                Query(by_model("gangway_requests_refused_total"), "{{model}}"),
                Query(f"sum({rate('gangway_calls_refused_unread_total', SERVER)})", "before it was read"),
            ],
        ),
        Chart(
            "Failed",
            "Requests that reached their model and were not answered, by reason",
            "reqps",
            [Query(f"sum by (reason) ({rate('nv_inference_request_failure')})", "{{reason}}")],
        ),
    ),
    "Cores": (
        Chart(
            "Cores busy",
            "Share of a core's time in gangs",
            "percentunit",
            [Query(rate("gangway_core_busy_seconds_total", SERVER), "{{instance}} core {{core}}")],
            1.0,
        ),
        Chart(
            "Requests that wait and run",
            "Waiting: without a core at the moment",
            "short",
            [
                Query(f"gangway_queue_length{SERVER}", "{{instance}} waiting"),
                Query(f"gangway_cores_busy{SERVER}", "{{instance}} cores in gangs"),
            ],
        ),
        Chart(
            "Changes of gangs",
            "How often the scheduler changed its mind about running requests",
            "ops",
            [
                Query(f"sum({rate(f'gangway_{name}_total')})", name)
                for name in ("preemptions", "conflicts", "growths", "shrinks")
            ],
        ),
        Chart(
            "Interference",
            "How much requests slow each other down; 1: as much as their profiles say",
            "short",
            [Query(f"gangway_interference_level{SERVER}", "{{instance}}")],
        ),
    ),
    "Limits": (
        Chart(
            "Memory",
            "Weights and arenas of models; tensors of requests in flight",
            "bytes",
            [
                Query(f"sum by (instance) (gangway_weights_bytes{MODEL})", "{{instance}} weights"),
                Query(f"sum by (instance) (gangway_arena_bytes{MODEL})", "{{instance}} arenas"),
                Query(f"gangway_heap_used_bytes{SERVER}", "{{instance}} tensors"),
            ],
        ),
        Chart(
            "Use of limits",
            "Share that is taken; at 1 requests are rejected or wait",
            "percentunit",
            [
                Query(f"gangway_request_slots_in_use{SERVER} / gangway_request_slots{SERVER}", "{{instance}} slots"),
                Query(f"gangway_leases_in_use{SERVER} / gangway_leases{SERVER}", "{{instance}} leases"),
                Query(f"gangway_heap_used_bytes{SERVER} / gangway_heap_size_bytes{SERVER}", "{{instance}} tensors"),
            ],
        ),
    ),
}


def figure_panel(figure: Figure) -> stat.Panel:
    """Return the panel of one number."""
    steps = [Threshold(value=value, color=color) for value, color in figure.steps]
    return (
        stat.Panel()
        .title(figure.title)
        .description(figure.description)
        .datasource(SOURCE)
        .unit(figure.unit)
        .thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(BigValueGraphMode.AREA)
        .with_target(prometheus.Dataquery().ref_id("A").expr(figure.expr))
        .height(4)
        .span(WIDTH // len(FIGURES))
    )


def chart_panel(chart: Chart) -> timeseries.Panel:
    """Return the panel of lines over time."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.TABLE).placement(LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    panel = (
        timeseries.Panel()
        .title(chart.title)
        .description(chart.description)
        .datasource(SOURCE)
        .unit(chart.unit)
        .min(0)
        .fill_opacity(8)
        .legend(legend.show_legend(True).calcs(["mean", "max"]))
        .tooltip(tooltip)
        .height(8)
        .span(WIDTH // 2)
    )
    if chart.most is not None:
        panel = panel.max(chart.most)
    for letter, query in zip("ABCD", chart.queries, strict=False):
        panel = panel.with_target(prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend))
    return panel


def variable(name: str, query: str) -> dashboard.QueryVariable:
    """Return a choice of values of a label, all of them by default."""
    every = VariableOption(selected=True, text="All", value="$__all")
    return (
        dashboard.QueryVariable(name)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .multi(True)
        .current(every)
    )


def board() -> dashboard.Dashboard:
    """Return the dashboard."""
    built = (
        dashboard.Dashboard("Gangway")
        .uid("gangway")
        .tags(["gangway", "inference"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(variable("instance", "label_values(gangway_cores, instance)"))
        .with_variable(variable("model", 'label_values(gangway_arena_bytes{instance=~"$instance"}, model)'))
    )
    numbers = count(1)
    for figure in FIGURES:
        built = built.with_panel(figure_panel(figure).id(next(numbers)))
    for title, charts in ROWS.items():
        built = built.with_row(dashboard.Row(title).id(next(numbers)))
        for chart in charts:
            built = built.with_panel(chart_panel(chart).id(next(numbers)))
    return built


def text() -> str:
    """Return the JSON of the dashboard."""
    return JSONEncoder(sort_keys=True, indent=2).encode(board().build()) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
