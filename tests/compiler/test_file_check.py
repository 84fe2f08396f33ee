"""What the static check says of files is what compiling them does, and it names the node that is in the way."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from gangway.compiler.check.file_check import CompiledRows, FileCheck, ServedBy, check_file
from testing.repository import GANGWAY
from tests.helpers.onnx_models import make_model

node = helper.make_node
WEIGHTS = {"w": np.ones((6, 6), np.float32)}
PRODUCT = node("MatMul", ["x", "w"], ["y"])
PLACES = (node("NonZero", ["y"], ["places"]), node("Cast", ["places"], ["z"], to=1))


@pytest.fixture
def file(network: Any, tmp_path: Path) -> Any:
    """Return the function that writes a file of float32 tensors and returns its path."""

    def write(nodes: list[Any], inputs: dict[str, list[Any]], outputs: Any = None, constants: Any = None) -> Path:
        path: Path = network(nodes, inputs, outputs or {"y": None}, constants or WEIGHTS).save(tmp_path / "some.onnx")
        return path

    return write


def test_any_number_of_rows(file: Any) -> None:
    assert check_file(file([PRODUCT], {"x": ["N", 6]})) == FileCheck(ServedBy.KERNELS, CompiledRows.ANY, layers=1)


def test_fixed_rows(file: Any) -> None:
    assert check_file(file([PRODUCT], {"x": [3, 6]})).rows is CompiledRows.FIXED


def test_sizes(file: Any) -> None:
    path = file([PRODUCT], {"x": ["N", "length", 6]})
    found = check_file(path)
    assert (found.rows, found.open_sizes) == (CompiledRows.ANY, ("length",))
    assert check_file(path, {"length": 7}).sizes == {"length": 7}


def test_a_size_that_is_the_sum_of_others(file: Any) -> None:
    """The mask of a decoder covers what was before and what is new."""
    nodes = [node("Concat", ["past", "x"], ["all"], axis=1), node("MatMul", ["all", "w"], ["p"]),
             node("Add", ["p", "mask"], ["y"])]  # fmt: skip
    path = file(nodes, {"x": ["N", "new", 6], "past": ["N", "before", 6], "mask": ["N", "whole", 6]})
    found = check_file(path)
    assert (found.served_by, found.rows) == (ServedBy.KERNELS, CompiledRows.ANY)
    assert found.sizes["whole"] == found.sizes["new"] + found.sizes["before"]


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_that_weights_fix(file: Any, groups: int) -> None:
    nodes = [node("Conv", ["x", "kernel"], ["h"], group=groups), node("GlobalAveragePool", ["h"], ["y"])]
    constants = {"kernel": np.ones((4, 3, 3, 3), np.float32)}
    found = check_file(file(nodes, {"x": ["N", "channels", "height", "width"]}, {"y": None}, constants))
    assert (found.served_by, found.rows) == (ServedBy.KERNELS, CompiledRows.ANY)
    assert found.sizes["channels"] == 3 * groups


@pytest.mark.parametrize("given", [{}, {"head": 6}, {"head": 5}])
def test_heads_of_earlier_keys_that_queries_fix(tmp_path: Path, given: dict[str, int]) -> None:
    past: list[int | str] = ["N", 1, "before", "head"]
    inputs: dict[str, list[int | str]] = {"x": ["N", 1, 6], "past k": past, "past v": past}
    constants = {"w": np.ones((6, 36), np.float32), "last": np.array([5], np.int32), "all": np.array(6, np.int32)}
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("GroupQueryAttention", ["h", "", "", "past k", "past v", "last", "all"], ["y", "keys", "values"],
             domain="com.microsoft", num_heads=4, kv_num_heads=1),
    ]  # fmt: skip
    model = make_model(nodes, inputs, dict.fromkeys(["y", "keys", "values"], ...), constants, 21,
                       ir_version=10, domains={"com.microsoft": 1})  # fmt: skip
    path = tmp_path / "attention.onnx"
    onnx.save(model, path)
    found = check_file(path, given)
    if given == {"head": 5}:
        assert "'past k' has heads of 5, queries of 6" in found.reason
    else:
        assert (found.served_by, found.sizes["head"]) == (ServedBy.KERNELS, 6), found.reason


def test_rows_that_influence_each_other(file: Any) -> None:
    found = check_file(file([PRODUCT, node("Softmax", ["y"], ["z"], axis=0)], {"x": ["N", 6]}, {"z": None}))
    assert (found.served_by, found.rows) == (ServedBy.KERNELS, CompiledRows.EACH)
    assert "(Softmax): it mixes rows of the batch" in found.reason


def test_an_island_is_named_with_its_reason(file: Any) -> None:
    nodes = [PRODUCT, node("Reshape", ["y", "picture"], ["p"])]
    nodes += [node("GridSample", ["p", "grid"], ["z"], mode="nearest")]
    constants = {**WEIGHTS, "picture": np.array([1, 1, 6, 6])}
    found = check_file(file(nodes, {"x": [6, 6], "grid": [1, 2, 2, 2]}, {"z": None}, constants))
    assert found.served_by is ServedBy.ISLANDS
    (island,) = found.islands
    assert dict(island.nodes) == {"GridSample": 1}
    assert "mode nearest" in island.reason
    assert not island.is_tail


def test_a_tail(file: Any) -> None:
    nodes = [PRODUCT, *PLACES]
    found = check_file(file(nodes, {"x": [3, 6]}, {"z": None}))
    assert found.served_by is ServedBy.ISLANDS
    assert found.islands[0].is_tail


def test_a_whole_model_for_onnxruntime(file: Any) -> None:
    found = check_file(file([node("Identity", ["x"], ["y"]), *PLACES], {"x": [3, 6]}, {"z": None}))
    assert found.served_by is ServedBy.ONNXRUNTIME
    assert "(NonZero)" in found.reason


def test_files_that_nothing_serves(tmp_path: Path, file: Any) -> None:
    path = file([node("Unheard", ["x"], ["y"], domain="somebody")], {"x": [3, 6]})
    found = check_file(path)
    assert found.served_by is ServedBy.NOTHING
    assert "Unheard" in found.reason
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    assert check_file(broken).served_by is ServedBy.NOTHING
    assert check_file(tmp_path / "absent.onnx").served_by is ServedBy.NOTHING


def _run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*GANGWAY, "check", *map(str, arguments)], capture_output=True, text=True, check=False)


def test_command(file: Any, tmp_path: Path) -> None:
    path = file([PRODUCT], {"x": ["N", "length", 6]})
    found = _run(path)
    assert found.returncode == 0, found.stderr
    assert "kernels" in found.stdout and "length=32" in found.stdout
    assert json.loads(_run(path, "--json", "--dimension", "length=5").stdout)[0]["sizes"] == {"length": 5}
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    alone = " ".join(_run(broken).stdout.split())  # whatever is wrapped
    assert "broken.onnx: cannot be served why: broken.onnx is not an ONNX file" in alone and "files" not in alone
    both = _run(tmp_path, "--static")
    assert both.returncode == 1
    assert "2 files: 1 cannot be served, 1 served by kernels" in both.stdout
    assert _run(path, "--fix").returncode == 2
