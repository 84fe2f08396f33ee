"""A sample of ONNX's node tests through compiler and executor, and the page that is written from all of them."""

import importlib
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.backend.test.case import node as node_cases

from benchmarks.conformance import runner as conformance_runner
from benchmarks.conformance.cases import Case, cases_of, same
from benchmarks.conformance.docs import operators, short_reason
from benchmarks.conformance.runner import CRASHED, NATIVE, RELAX, CaseRunner, run_all
from gangway.artifact.format import MANIFEST_FILE
from gangway.base.json_codec import encode
from gangway.compiler.pipeline import compile_model
from gangway.executor.launch import available_cores

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "operators.md"
MODULES = ("relu", "concat", "where", "trilu", "resize", "isnan", "logsoftmax", "nonzero", "expand", "greater")
KERNELS = {NATIVE, RELAX}  # which of the two may change; that there are some may not
SAMPLE = {
    "test_relu": {NATIVE},
    "test_concat_2d_axis_0": {NATIVE},
    "test_concat_3d_axis_negative_2": {NATIVE},
    "test_where_example": KERNELS,
    "test_isnan": KERNELS,
    "test_expand_dim_changed": KERNELS,
    "test_logsoftmax_axis_1_expanded": KERNELS,
    "test_greater_bcast": KERNELS,
    "test_tril": KERNELS,
    "test_resize_downsample_scales_nearest": {RELAX},
    "test_resize_upsample_scales_linear_align_corners": {RELAX},
    "test_resize_upsample_scales_cubic_A_n0p5_exclude_outside": {RELAX},
    "test_resize_tf_crop_and_resize_extrapolation_value": {RELAX},
    "test_resize_upsample_sizes_nearest_not_larger": {RELAX},
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    """The tests of some of onnx's modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx computes logarithms of zero
        for name in MODULES:
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    return {case.name: case for case in cases_of(list(node_cases._NodeTestCases))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what is compiled of the sample stays."""
    return tmp_path_factory.mktemp("sample")


def test_a_sample_is_compiled_and_right(cases: dict[str, Case], folder: Path) -> None:
    with CaseRunner(folder, available_cores()[0]) as runner:
        outcomes = {name: runner.run(cases[name]) for name in SAMPLE}
    assert {name: outcome.error for name, outcome in outcomes.items() if not outcome.passed} == {}
    assert {name: outcome.how for name, outcome in outcomes.items() if outcome.how not in SAMPLE[name]} == {}


def test_answers_do_not_show_what_lay_in_memory(cases: dict[str, Case], folder: Path) -> None:
    with CaseRunner(folder, available_cores()[0], poisons=True) as runner:
        outcomes = {name: runner.run(cases[name]) for name in SAMPLE}
    assert {name: outcome.error for name, outcome in outcomes.items() if not outcome.passed} == {}


def test_an_answer_that_nobody_wrote_is_noticed(
    cases: dict[str, Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an artifact that claims twice as many numbers as its kernel writes."""
    whole = compile_model

    def doubled(*arguments: Any) -> Any:
        compiled = whole(*arguments)
        (output,) = compiled.manifest.outputs
        longer = replace(output, shape=(2 * output.shape[0], *output.shape[1:]), row_bytes=2 * output.row_bytes)
        manifest = replace(compiled.manifest, outputs=(longer,))
        (compiled.folder / MANIFEST_FILE).write_bytes(encode(manifest))
        return replace(compiled, manifest=manifest)

    monkeypatch.setattr(conformance_runner, "compile_model", doubled)
    with CaseRunner(tmp_path, available_cores()[0], poisons=True) as runner:
        assert "what lay in memory before" in runner.run(cases["test_relu"]).error


def test_a_crash_is_the_failure_of_one_test(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [cases[name] for name in ("test_relu", "test_isnan", "test_concat_2d_axis_0")]
    monkeypatch.setattr(conformance_runner, "peer_error", lambda case: os._exit(3) if "isnan" in case.name else "")
    counted: list[int] = []
    outcomes = run_all(chosen, 1, counted.append)
    assert [outcome.name for outcome in outcomes] == [case.name for case in chosen]
    assert [outcome.how for outcome in outcomes] == [NATIVE, CRASHED, NATIVE]
    assert "ended with 3" in outcomes[1].error
    assert counted == [1, 2, 3]


def test_tests_out_of_scope_have_a_reason(cases: dict[str, Case]) -> None:
    assert cases["test_relu"].excluded == ""
    assert "float16" not in {case.excluded for case in cases.values() if case.name in SAMPLE}
    assert {case.operator for case in cases.values() if case.name.startswith("test_logsoftmax")} == {"LogSoftmax"}


def test_answers_are_compared_with_type_and_shape(cases: dict[str, Case]) -> None:
    case = replace(cases["test_relu"], rtol=1e-3, atol=1e-7)
    right = np.array([1, np.nan, np.inf], np.float32)
    assert same(right * np.float32(1.0005), right, case) == ""
    assert "type" in same(right.astype(np.float64), right, case)
    assert "shape" in same(right[None], right, case)
    assert "1 of 3 numbers" in same(np.array([1.01, np.nan, np.inf], np.float32), right, case)


def test_the_page_names_every_operator() -> None:
    words = set(re.findall(r"\w+", PAGE.read_text()))
    assert set(operators()) - words == set()


def test_reasons_on_the_page_are_short() -> None:
    reason = "1 nodes have unsupported operators: Loop (first node 'a' (Loop): no kernel computes this operator)"
    assert short_reason(f"{reason}; and onnxruntime refuses it: why") == "Loop: no kernel"
    assert short_reason(f"onnxruntime refuses it: why; nor can it be compiled: {reason}") == "Loop: no kernel"
    assert len(short_reason("x" * 1000)) <= 110
