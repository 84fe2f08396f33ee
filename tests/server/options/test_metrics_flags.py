"""The flags of the metrics' port."""

from pathlib import Path

import pytest

from gangway.server.options.command_line import parse_options
from gangway.server.options.endpoints import MetricsOptions


def metrics(*flags: str) -> MetricsOptions:
    return parse_options([f"--model-repository={Path.cwd()}", "--cores=0", *flags]).metrics


def test_defaults_are_tritons() -> None:
    assert metrics() == MetricsOptions(True, 8002, "0.0.0.0", 2000, True, True, False)
    assert metrics("--http-address=127.0.0.2").address == "127.0.0.2"


def test_everything_can_be_said() -> None:
    flags = ["--allow-metrics=false", "--metrics-address=::1", "--metrics-port=0", "--metrics-interval-ms=50"]
    flags += ["--allow-cpu-metrics=0", "--metrics-config=counter_latencies=false"]
    flags += ["--metrics-config", "histogram_latencies=true", "--metrics-config=summary_latencies=false"]
    assert metrics(*flags) == MetricsOptions(False, 0, "::1", 50, False, False, True)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--metrics-config=summary_latencies=true", "summary_latencies: summaries are not served"),
        ("--metrics-config=summary_quantiles=0.5:0.05,0.9:0.01", "summary_quantiles: summaries are not served"),
        ("--metrics-config=counter_latency=false", "unknown setting 'counter_latency'"),
        ("--metrics-config=counter_latencies", "'counter_latencies' is not KEY=VALUE"),
        ("--metrics-config=counter_latencies=perhaps", "'perhaps' is neither true nor false"),
        ("--metrics-interval-ms=0", "0 is not from 1"),
        ("--metrics-port=65536", "65536 is not a port"),
        ("--allow-metrics=maybe", "'maybe' is neither true nor false"),
    ],
)
def test_what_makes_no_sense_is_refused(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        metrics(flag)
    assert said in capsys.readouterr().err
