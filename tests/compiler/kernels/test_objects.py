"""Kernels of a compilation: several are built at a time, and only those that a model's rows need."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest, TargetSpec
from gangway.compiler.kernels.objects import KernelObjects
from gangway.compiler.kernels.plain_specs import Instruction, Operand, PointwiseSpec
from gangway.compiler.kernels.specs import KernelPlan
from gangway.compiler.kernels.templates import registry
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from tests.helpers.onnx_models import save_model


def add(elements: int) -> PointwiseSpec:
    return PointwiseSpec((elements,), (Operand("float32", (1,)),) * 2, (Instruction("add", (0, 1), "float32"),))


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    root, scratch = tmp_path / "cache", tmp_path / "cache" / "scratch"
    scratch.mkdir(parents=True)
    return root, scratch


def test_all_kernels_are_built_and_counted_in_turn(folders: tuple[Path, Path]) -> None:
    target, told = detect(), list[tuple[int, int]]()
    plans: Sequence[KernelPlan] = [registry.plan(add(16 * n), target) for n in range(1, 24)]
    names = {plan.spec: f"layer {number}" for number, plan in enumerate(plans)}
    kernels = KernelObjects(*folders, target, "").build(plans, names, lambda *count: told.append(count))
    assert list(kernels) == plans
    assert len({kernel.symbol for kernel in kernels.values()}) == len(plans)
    assert told == [(done, len(plans)) for done in range(len(plans) + 1)]


def test_the_layer_is_named_whose_kernel_cannot_be_built(folders: tuple[Path, Path]) -> None:
    target = detect()
    plans = [registry.plan(add(16 * n), target) for n in (1, 2)]
    names = {plans[0].spec: "the first", plans[1].spec: "the second"}
    objects = KernelObjects(folders[0], folders[1] / "none", target, "")  # a folder that does not exist
    with pytest.raises(Exception) as caught:
        objects.build(plans, names, lambda *_: None)
    assert caught.value.__notes__ == ["the first"]


def dense(path: Path, rows: int | str) -> Path:
    weights = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    return save_model(path, nodes, {"x": [rows, 64]}, {"y": [rows, 64]}, {"w": weights})


@pytest.mark.parametrize(("rows", "has_batches"), [("N", True), (1, False)])
def test_only_models_with_a_batch_have_kernels_for_several_rows(
    tmp_path: Path, rows: int | str, has_batches: bool
) -> None:
    target: TargetSpec = detect()
    path = dense(tmp_path / "model.onnx", rows)
    manifest: Manifest = compile_model(path, "dense", Cache(tmp_path / "cache"), target, lambda *_: None).manifest
    assert any(layer.versions[0].batch for layer in manifest.layers) is has_batches
