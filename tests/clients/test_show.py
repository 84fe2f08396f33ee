"""What the client prints, and the arithmetic behind it."""

import numpy as np
import pytest

from gangway.artifact.console import Console
from gangway.clients.command import server_times, show_outputs, show_timing, top_of
from gangway.clients.connection import RefusedError
from gangway.protos import grpc_service_pb2 as pb


def statistics(count: int, ns: int) -> pb.ModelStatisticsResponse:
    response = pb.ModelStatisticsResponse()
    stats = response.model_stats.add(name="m").inference_stats
    stats.success.count = count
    for number, phase in enumerate((stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output), 1):
        phase.ns = number * ns
    return response


def printed(console: Console) -> str:
    return console.export_text()


def test_server_times_are_differences_per_request() -> None:
    spent = server_times(statistics(7, 9_000_000)).since(server_times(statistics(5, 1_000_000)))
    assert spent.requests == 2
    assert spent.mean_ms("queue") == pytest.approx(4)
    assert spent.mean_ms("compute_infer") == pytest.approx(12)
    assert spent.total_ms == pytest.approx(40)


def test_a_model_without_statistics_is_an_error() -> None:
    with pytest.raises(RefusedError):
        server_times(pb.ModelStatisticsResponse())


def test_timing_table_adds_up() -> None:
    console = Console(record=True, width=100)
    spent = server_times(statistics(2, 1_000_000)).since(server_times(statistics(0, 0)))
    show_timing(console, [6.0, 8.0], spent)
    text = printed(console)
    assert "mean of 2" in text
    assert "7.000" in text  # round trip
    assert "2.000" in text  # transport: 7 - (1 + 2 + 3 + 4) / 2
    assert "other clients" not in text


def test_foreign_requests_are_mentioned() -> None:
    console = Console(record=True, width=100)
    show_timing(console, [6.0], server_times(statistics(3, 1)))
    assert "means over 3 requests" in printed(console)


def test_largest_values_first() -> None:
    row = np.array([0.1, 0.9, -3, 0.5], dtype=np.float32)
    assert top_of(row, 2) == [
        (1, pytest.approx(0.9)),
        (3, pytest.approx(0.5)),
    ]


def test_scores_are_ranked_and_other_outputs_are_not() -> None:
    console = Console(record=True, width=100)
    outputs = {
        "scores": np.array([[0.25, 0.75, 0.5]], dtype=np.float32),
        "counts": np.array([[4, 3, 2]], dtype=np.int32),
    }
    show_outputs(console, outputs, top=1)
    text = printed(console)
    assert "1x3" in text
    assert "0.25, 0.75, 0.5" in text
    assert "largest values of scores" in text
    assert "largest values of counts" not in text
