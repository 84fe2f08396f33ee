"""What the linker gets and gives: plain symbols, no dependency on anything."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.plain_specs import Instruction, Operand, PointwiseSpec
from gangway.compiler.kernels.specs import ConvSpec
from gangway.compiler.kernels.templates import registry
from tests.helpers.kernel_runs import build


def plain(operator: str, dtype: str, elements: int) -> PointwiseSpec:
    operands = (Operand(dtype, (1,)),) * 2
    return PointwiseSpec((elements,), operands, (Instruction(operator, (0, 1), dtype),))


def assembly(library: Path) -> str:
    command = ["objdump", "-d", "--no-show-raw-insn", str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


@pytest.fixture
def library_path(tmp_path: Path) -> Path:
    """None that is kept: tests look at the file that has just been built."""
    return tmp_path / "kernels.so"


def test_a_library_needs_nothing_and_names_its_kernels(target: TargetSpec, library_path: Path) -> None:
    specs = {"first": plain("add", "int32", 16), "second": plain("sub", "int32", 16)}
    functions = {name: registry.emit(registry.plan(spec, target), target, name) for name, spec in specs.items()}
    times = codegen.build_library(functions, target, library_path)
    assert min(times.lower_us, times.llvm_us, times.link_us) > 0
    command = ["nm", "-D", str(library_path)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert " T first" in symbols and " T second" in symbols
    assert " U " not in symbols


def test_local_memory_lies_on_the_stack(target: TargetSpec, library_path: Path) -> None:
    plan = registry.plan(AttentionSpec(1, 16, 8, 600, 1.0), target)
    build({"k": plan}, target, library_path)
    command = ["nm", "-D", "--undefined-only", "--format=just-symbols", str(library_path)]
    needed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    assert set(needed) <= {"memset", "memcpy"}


def test_a_convolution_keeps_its_sums_in_registers(target: TargetSpec, library_path: Path) -> None:
    plan = registry.plan(ConvSpec(64, 14, 14, 64), target)
    build({"k": plan}, target, library_path)
    code = assembly(library_path)
    register = {"avx512": "zmm", "avx2": "ymm", "baseline": "xmm"}[target.name]
    assert register in code
    assert ("vfmadd" in code) == (target.name != "baseline")
    if target.name != "baseline":  # without FMA a product needs a register, too
        assert len(re.findall(rf"%{register}\d+,-?0x[0-9a-f]+\(%r[sb]p\)", code)) <= 2  # bias, before the loop


def test_vectors_are_accessed_without_alignment(target: TargetSpec, library_path: Path) -> None:
    plan = registry.plan(plain("add", "float32", 1 << 16), target)
    build({"k": plan}, target, library_path)
    assert not re.findall(r"v?mova[dp][qsd]\w*\s+.*\(", assembly(library_path))


def test_a_bias_made_anew_lets_no_matrix_be_packed_anew() -> None:
    """Of each size of a model with many words; the matrix is the same memory, which alone is compared."""
    written, matrix, packed = codegen.WrittenWeights(), np.ones((4, 30_000), np.float32), list[int]()

    def pack() -> tuple[int, ...]:
        packed.append(len(packed))
        return (packed[-1],)

    places = [written.place("dense", [np.zeros(30_000, np.float32), matrix], pack) for _ in range(3)]
    assert places == [(0,)] * 3
    assert written.place("dense", [np.ones(30_000, np.float32), matrix], pack) == (1,)
    assert written.place("dense", [np.zeros(30_000, np.float32), matrix.copy()], pack) == (2,)
