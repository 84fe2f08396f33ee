"""Where engines answer differently: asks all that are installed what `rows.py` says; OpenVINO is of extra `bench`."""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

from benchmarks.conformance.runner import CaseRunner, RefusedError
from benchmarks.differences.rows import DIFFERENCES, GANGWAY, OPENVINO, ORT, REFERENCE, REFUSED, TVM, Answer, Difference
from gangway.compiler.errors import ModelError
from testing.report import option_parser, start_report

Feeds = Mapping[str, Any]


def ask(engine: str, difference: Difference, gangway: CaseRunner | None = None) -> Answer:
    """Return the numbers of all outputs one after the other, or REFUSED. `gangway`: for that engine."""
    run: Callable[[onnx.ModelProto, Feeds], Sequence[Any]] = {
        ORT: _onnxruntime, REFERENCE: _reference, TVM: _tvm, OPENVINO: _openvino, GANGWAY: partial(_gangway, gangway)
    }[engine]  # fmt: skip
    try:
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
            outputs = run(difference.proto, difference.feeds())
    except (ModelError, RefusedError):
        return REFUSED
    except Exception as error:  # engines have no common one
        if engine == GANGWAY:
            raise
        assert str(error), engine
        return REFUSED
    return [number for output in outputs for number in np.asarray(output).flatten().tolist()]


def agrees(answer: Answer, expected: Answer) -> bool:
    """Whether an engine answers what the table says."""
    if isinstance(answer, str) or isinstance(expected, str):
        return answer == expected
    return len(answer) == len(expected) and all(map(_is_near, answer, expected))


def _is_near(number: float, expected: float) -> bool:
    """Compare integers exactly: 2^53 + 1 is none of a float's numbers."""
    if isinstance(number, int) and isinstance(expected, int):
        return number == expected
    return bool(np.isclose(number, expected, rtol=1e-5, atol=1e-6, equal_nan=True))


def _onnxruntime(model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    outputs: Sequence[Any] = onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, dict(feeds))
    return outputs


def _reference(model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    outputs: Any = ReferenceEvaluator(model).run(None, dict(feeds))
    return list(outputs)


def _tvm(model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    tvm, frontend = import_module("tvm"), import_module("tvm.relax.frontend.onnx")  # take seconds
    relax = tvm.relax
    built = relax.build(relax.transform.LegalizeOps()(frontend.from_onnx(model, keep_params_in_input=False)), "llvm")
    outputs = relax.VirtualMachine(built, tvm.cpu())["main"](*map(tvm.runtime.tensor, feeds.values()))
    return [each.numpy() for each in ([outputs] if hasattr(outputs, "numpy") else outputs)]


def _openvino(model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    openvino = import_module("openvino")  # of the extra `bench`
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        file.write(model.SerializeToString())
        file.flush()
        core = openvino.Core()
        compiled = core.compile_model(core.read_model(file.name), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        outputs = compiled(list(feeds.values()))
        return [outputs[each] for each in compiled.outputs]


def _gangway(runner: CaseRunner | None, model: onnx.ModelProto, feeds: Feeds) -> Sequence[Any]:
    assert runner is not None
    return runner.answers(runner.compile(model.SerializeToString()), [list(feeds.values())])[0]


def main() -> int:
    """Ask all engines that are installed; return 1 where one answers otherwise than the table says."""
    options = option_parser(__doc__ or "").parse_args()
    report = start_report("Where engines answer differently")
    engines = [ORT, REFERENCE, TVM, GANGWAY, *([OPENVINO] if find_spec("openvino") else [])]
    rows = []
    with tempfile.TemporaryDirectory() as folder, CaseRunner(Path(folder), min(os.sched_getaffinity(0))) as runner:
        for each in DIFFERENCES:
            for engine in engines:
                if engine in each.answers and not agrees(found := ask(engine, each, runner), each.answers[engine]):
                    told = {"expected": str(each.answers[engine]), "found": str(found)}
                    rows.append({"difference": f"{each.area}: {each.what}", "engine": engine, **told})
    if rows:
        report.table("answers otherwise than the table says", rows)
    report.target(
        f"of {len(DIFFERENCES)} rows, asked {', '.join(engines)}: answers that are not the table's", len(rows), 0
    )
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
