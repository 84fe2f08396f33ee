"""What the client prints, and the arithmetic behind it."""

import numpy as np
import pytest

from gangway.base.console import Console
from gangway.clients.command import is_scores, server_times, show_outputs, show_timing
from gangway.clients.errors import RefusedError
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


def test_classes_and_other_outputs_are_shown() -> None:
    console = Console(record=True, width=80)
    outputs = {
        "scores": np.array([[b"0.75:1:left:right", b"0.5:2"]], object),
        "counts": np.array([[4, 3, 2]], dtype=np.int32),
        "texts": np.array([b"caf\xc3\xa9", b"\xff"], object),
    }
    show_outputs(console, outputs, classified=["scores"])
    text = printed(console)
    assert "best classes of scores" in text and "left:right" in text and "0.75" in text
    assert "1x3" in text and "4, 3, 2" in text
    assert "'café', '\\\\xff'" in text


def test_long_elements_are_shown_by_their_beginning() -> None:
    console = Console(record=True, width=200)
    show_outputs(console, {"picture": np.array([b"\xff" + b"x" * 100_000], object)}, classified=[])
    text = printed(console)
    assert "... (100001 bytes)" in text and len(text) < 1000


def test_scores_are_floats_of_one_dimension_beside_the_batch() -> None:
    def output(datatype: str, *shape: int) -> pb.ModelMetadataResponse.TensorMetadata:
        return pb.ModelMetadataResponse.TensorMetadata(name="y", datatype=datatype, shape=shape)

    assert (
        is_scores(output("FP32", -1, 1000)) and is_scores(output("FP64", 1000)) and is_scores(output("FP32", 1, 9, 1))
    )
    assert not is_scores(output("INT32", -1, 1000)) and not is_scores(output("FP32", -1, 7, 7))
