"""`docs/reference/operators.md`, written from a run of the conformance tests."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
from onnx import defs

from benchmarks.conformance.cases import NEWEST_OPSET, Case
from benchmarks.conformance.runner import NATIVE, ONNXRUNTIME, RELAX, Outcome
from benchmarks.fuzz.differential.known import KNOWN

Result = tuple[Case, Outcome]
Row = tuple[str, str, str]  # operator, how many tests do not pass, what stands in the way
_HEAD = f"""# Operators

`python -m benchmarks.conformance --write-docs` writes this page: it sends ONNX's own node tests (onnx {{version}})
through compiler and executor. A test is in scope if its tensors are float32, integers or bool, and its model imports
opset {NEWEST_OPSET} at most.

- **native**: kernels of our own templates compute all layers.
- **Relax**: TVM's Relax computes some layer, which is compared with onnxruntime.
- **onnxruntime**: onnxruntime runs the model, or layers of it, on the cores of the gang.
- **not passing**: no answer, or a wrong one.

The tests feed weights as inputs. With constant weights Conv, ConvTranspose, LSTM, GRU, RNN, Gemm, Pad, Slice,
QuantizeLinear and DequantizeLinear are native, too. [Artifact](../explanation/artifact.md#element-types) says what
undefined cases give.
"""
_DIFFERENCES = """## Other differences from onnxruntime

`python -m benchmarks.fuzz.differential` draws models of one operator by chance. Answers are onnxruntime's, up to the
rounding of floats, but for these and for those that [all engines](differences.md) have:

"""


def write_docs(path: Path, results: Sequence[Result]) -> None:
    """Write the page."""
    scope = [result for result in results if not result[0].excluded]
    later = [result for result in results if result[0].excluded]
    parts = [
        _HEAD.format(version=onnx.__version__),
        _total(scope),
        f"## Tests up to opset {NEWEST_OPSET}\n\n{_table(scope)}",
        *(
            [f"## Tests of later opsets\n\nThe total above does not count them.\n\n{_table(later, with_reasons=False)}"]
            if later
            else []
        ),
        differences(),
        f"## Without a test in scope\n\n{_untested(results)}",
    ]
    path.write_text("\n".join(parts))


def differences() -> str:
    """Return the section about answers that differ from onnxruntime's."""
    lines = ["| operator | difference |", "|---|---|"]
    lines += [f"| {', '.join(known.operators)} | {known.what} |" for known in KNOWN if not known.is_of_numbers]
    return _DIFFERENCES + "\n".join(lines) + "\n"


def _total(scope: Sequence[Result]) -> str:
    how = Counter(outcome.how for _, outcome in scope if outcome.passed)
    compiled = how[NATIVE] + how[RELAX]
    failed = [outcome for _, outcome in scope if not outcome.passed]
    ours = sum(not outcome.peer_error for outcome in failed)
    return (
        f"Of {len(scope)} tests {how[NATIVE]} pass native and {how[RELAX]} with Relax, together"
        f" {100 * compiled / max(1, len(scope)):.1f} %; {how[ONNXRUNTIME]} pass by onnxruntime;"
        f" {len(failed)} do not pass, of which onnxruntime alone passes {ours}.\n"
    )


def _table(results: Sequence[Result], with_reasons: bool = True) -> str:
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for case, outcome in results:
        groups[case.operator].append(outcome)
    native = [name for name in sorted(groups) if all(each.passed and each.how == NATIVE for each in groups[name])]
    relax = [name for name in sorted(groups) if name not in native and all(each.is_compiled for each in groups[name])]
    rows = [_row(name, groups[name]) for name in sorted(groups.keys() - {*native, *relax})]
    return table(native, relax, rows, with_reasons)


def table(native: Sequence[str], relax: Sequence[str], rows: Sequence[Row], with_reasons: bool = True) -> str:
    """Return lists of the operators of which all tests are compiled, and the others, or by what stands in the way."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, counts, why in rows:
        by_reason[why if with_reasons else ""].append(f"{name} ({counts})" if counts else name)
    by_count = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    others = (
        ["onnxruntime computes some of the tests, by what stands in the way:\n"]
        + [f"- {why}: {', '.join(some)}" for why, some in by_count]
        + [""]
        if with_reasons
        else [f"onnxruntime computes some of the tests of {', '.join(by_reason[''])}.\n"]
    )
    return "\n".join([_all("native", native), _all("native or by Relax", relax), *others])


def _all(how: str, names: Sequence[str]) -> str:
    return f"All tests are {how}: {', '.join(names)}.\n" if names else ""


def _row(operator: str, outcomes: Sequence[Outcome]) -> Row:
    """Return an operator, how many of its tests do not pass, and why not all are compiled."""
    failed = sum(not outcome.passed for outcome in outcomes)
    counts = f"{failed} of {len(outcomes)} not passing" if failed else ""
    reasons = Counter(short_reason(o.reason or o.error) for o in outcomes if not o.is_compiled or not o.passed)
    why = reasons.most_common(1)[0][0].partition("; Relax: ")[0].removeprefix(f"{operator}: ") if reasons else ""
    return operator, counts, why


def short_reason(text: str) -> str:
    """Return a reason without names of nodes and tensors, in one short piece."""
    text = text.rpartition("; nor can it be compiled: ")[2].split("; and onnxruntime ", maxsplit=1)[0]
    text = re.sub(r"^\d+ nodes have unsupported operators: [^(]*\(first ", "", text)
    text = re.sub(r"node '[^']*' \((\w+)\): ", r"\1: ", text)
    text = re.sub(r" ?'[^']*'", "", text).removesuffix(")")
    text = re.sub(r"The following operators are not supported for frontend ONNX: .*", "not supported", text)
    text = text.replace("no kernel computes this operator", "no kernel").replace("|", "/").replace(",,", "")
    text = " ".join(text.split())
    return text if len(text) <= 110 else f"{text[:107]}..."


def _untested(results: Iterable[Result]) -> str:
    tested = {case.operator for case, _ in results}
    return ", ".join(sorted(set(operators()) - tested)) + ".\n"


def operators() -> list[str]:
    """Return the names of ONNX's own operators up to the newest opset that counts."""
    schemas = (schema for schema in defs.get_all_schemas_with_history() if not schema.domain and not schema.deprecated)
    return sorted({schema.name for schema in schemas if schema.since_version <= NEWEST_OPSET})
