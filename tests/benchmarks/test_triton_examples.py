"""How Triton's client examples are called. To run them all: `python -m benchmarks.other_clients.triton_examples`."""

import pytest

from benchmarks.other_clients.triton_example_list import examples_of
from benchmarks.other_clients.triton_examples import run_example


@pytest.mark.parametrize(
    ("script", "protocol", "explicit"),
    [
        ("simple_grpc_infer_client.py", "grpc", 0),
        ("simple_http_aio_infer_client.py", "http", 0),
        ("grpc_explicit_int_content_client.py", "grpc", 0),
        ("simple_grpc_model_control.py", "grpc", 8),
        ("simple_http_model_control.py", "http", 7),
    ],
)
def test_one_call(script: str, protocol: str, explicit: int) -> None:
    (example,) = examples_of([script])
    assert (example.script, example.protocol, example.explicit) == (script, protocol, explicit)
    assert not example.not_applicable


def test_what_cannot_pass_is_not_called(tmp_path) -> None:
    scripts = ["simple_http_cudashm_client.py", "simple_grpc_custom_repeat.py", "memory_growth_test.py"]
    urls = {"grpc": "127.0.0.1:7001", "http": "127.0.0.1:7000"}
    outcomes = [run_example(example, tmp_path, urls, tmp_path / "none.png") for example in examples_of(scripts)]
    assert [outcome.result for outcome in outcomes] == ["not applicable"] * 4
    assert [outcome.detail for outcome in outcomes] == [
        "CUDA shared memory needs a GPU",
        "asks for a model of a backend in C++",
        "it speaks to port 8001 only",
        "it speaks to port 8000 only",
    ]


def test_the_end_of_a_script_decides(tmp_path) -> None:
    (tmp_path / "grpc_client.py").write_text("import sys; print('bad'); sys.exit('-u' not in sys.argv or 3)")
    (tmp_path / "simple_grpc_x.py").write_text("print('PASS')")
    (tmp_path / "simple_grpc_y.py").write_text("import no_such_package.at_all")
    calls = examples_of(["grpc_client.py", "simple_grpc_x.py", "simple_grpc_y.py"])
    outcomes = [run_example(call, tmp_path, {"grpc": "127.0.0.1:1"}, tmp_path / "none.png") for call in calls]
    assert [(outcome.result, outcome.detail) for outcome in outcomes] == [
        ("FAILED", "bad"),
        ("passed", ""),
        ("not applicable", "package no_such_package is not installed"),
    ]


def test_sequences_are_called_for_both_strategies() -> None:
    for protocol in ("grpc", "http"):
        calls = examples_of([f"simple_{protocol}_sequence_sync_infer_client.py"])
        assert [(call.protocol, tuple(call.arguments)) for call in calls] == [(protocol, ()), (protocol, ("--dyna",))]
