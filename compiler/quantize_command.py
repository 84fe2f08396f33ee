"""`gangway quantize`: make an int8 model of a float32 one by onnxruntime's static quantisation, and say how they agree.

Activations are uint8, weights int8, symmetric and per channel: what integer kernels take. Ranges of activations come
from examples of requests. Others of them, which it has not seen, are asked of both models.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from gangway.artifact.onnx_session import reason_of
from gangway.artifact.precision import Agreement
from gangway.base.command_line import CommandParser
from gangway.compiler.arguments import MODEL_FILE, find_models
from gangway.compiler.comparison.agreement import cosine, top1
from gangway.compiler.errors import ModelError
from gangway.compiler.kernels.specs import Array
from gangway.compiler.model_file import make_readable, open_model, parse

Feeds = Mapping[str, Array]  # of one request, by input

COMPARED = 0.2  # share of the examples, at least one of two
PER_CHANNEL_OPSET = 13  # QuantizeLinear has an axis
METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}  # names there


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 where model or data are no use. Wrong arguments exit with 2 (argparse)."""
    options = _parser().parse_args(argv)
    try:
        name, path = find_models(options.path)[-1]
        output = options.output or default_output(options.path)
        examples = read_examples(options.data, options.examples)
        calibration, compared = divided(examples)
        quantise(path, output, calibration, METHODS[options.method], options.keep, options.reduce_range)
        agreement = agreement_of(path, output, compared)
    except (ModelError, OSError) as error:
        print(f"gangway quantize: {error}", file=sys.stderr)
        return 1
    sizes = " -> ".join(f"{file.stat().st_size / 1e6:.1f} MB" for file in (path, output))
    print(f"{name}: {len(calibration)} examples for ranges, {agreement.examples} others compared: {agreement}")
    print(f"{sizes}: {output}")
    return 0


def default_output(path: Path) -> Path:
    """Return NAME_int8/1/model.onnx beside a model directory, NAME_int8.onnx beside a file."""
    name = path.resolve().with_suffix("").name + "_int8"
    return path.with_name(name) / "1" / MODEL_FILE if path.is_dir() else path.with_name(f"{name}.onnx")


def read_examples(folder: Path, most: int) -> list[Feeds]:
    """Return the requests in a folder, by name: .npz files with an array for each input, or .npy files of the only one.

    Raises ModelError if there is none, OSError.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder of .npz or .npy files")
    files = sorted(file for file in folder.iterdir() if file.suffix in (".npz", ".npy"))[:most]
    if not files:
        raise ModelError(f"{folder} has no .npz or .npy file: one for each request, with its arrays by input")
    found: list[Feeds] = []
    for file in files:
        try:
            content = np.load(file)
        except ValueError as error:
            raise ModelError(f"{file}: {error}") from error
        found.append({name: content[name] for name in content.files} if file.suffix == ".npz" else {"": content})
    return found


def divided(examples: Sequence[Feeds]) -> tuple[Sequence[Feeds], Sequence[Feeds]]:
    """Return those for the ranges and those for the comparison: the same one, if there is only one."""
    compared = max(1, int(COMPARED * len(examples)))
    return examples[: len(examples) - compared] or examples, examples[-compared:]


def quantise(
    path: Path, output: Path, examples: Sequence[Feeds], method: str, keep: Sequence[str], reduce_range: bool
) -> None:
    """Write the quantised model. `keep`: operators, or names of nodes, that stay float32.

    `reduce_range`: weights have 7 bits. Raises ModelError for examples that do not fit the model, OSError.
    """
    import onnx  # noqa: PLC0415 - a second
    import onnx.version_converter  # noqa: PLC0415
    from onnxruntime import quantization as ort  # noqa: PLC0415
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    model, _ = parse(path)
    feeds = [_fitting(path, each) for each in examples]
    nodes = model.graph.node
    if unknown := set(keep) - {node.op_type for node in nodes} - {node.name for node in nodes}:
        raise ModelError(f"--keep: the model has neither operators nor nodes called {', '.join(sorted(unknown))}")
    output.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger().setLevel(logging.ERROR)  # it advises what has been done
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        prepared, made = Path(folder) / "prepared.onnx", Path(folder) / "made.onnx"
        try:
            source = path
            if any(each.domain in ("", "ai.onnx") and each.version < PER_CHANNEL_OPSET for each in model.opset_import):
                source = Path(folder) / "newer.onnx"
                onnx.save(onnx.version_converter.convert_version(onnx.load(path), PER_CHANNEL_OPSET), source)
            elif make_readable(model):
                source = Path(folder) / "older.onnx"
                whole = onnx.load(path)
                make_readable(whole)
                onnx.save(whole, source)
            quant_pre_process(source, prepared, skip_symbolic_shape=True)
            kept = [
                node.name
                for node in onnx.load(prepared, load_external_data=False).graph.node
                if node.op_type in keep or node.name in keep
            ]
            ort.quantize_static(
                prepared,
                made,
                cast("Any", _Reader(feeds)),
                per_channel=True,
                reduce_range=reduce_range,
                activation_type=ort.QuantType.QUInt8,
                weight_type=ort.QuantType.QInt8,
                nodes_to_exclude=kept,
                calibrate_method=getattr(ort.CalibrationMethod, method),
                extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
            )
        except OSError:
            raise
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise ModelError(f"onnxruntime cannot quantise {path}: {reason_of(error)}") from error
        made.replace(output)


def agreement_of(path: Path, output: Path, examples: Sequence[Feeds]) -> Agreement:
    """Return how the answers of both models to these requests agree, both of onnxruntime."""
    exact, quantised = open_model(path), open_model(output)
    least, shares = 1.0, []
    for each in examples:
        feeds = _fitting(path, each)
        for wanted, got in zip(exact.run(None, feeds), quantised.run(None, feeds), strict=True):
            least = min(least, cosine(got, wanted))
            shares.append(top1(got, wanted))
    return Agreement(least, float(np.mean(shares)), len(examples))


def _fitting(path: Path, feeds: Feeds) -> Feeds:
    """Return the arrays by input. Raises ModelError where they are not those of the model."""
    inputs = {each.name: each for each in open_model(path).get_inputs()}
    if feeds.keys() == {""} and len(inputs) == 1:
        feeds = dict(zip(inputs, feeds.values(), strict=True))
    if missing := inputs.keys() - feeds.keys():
        raise ModelError(f"an example has no array '{min(missing)}'; it has {', '.join(feeds) or 'none'}")
    return {name: feeds[name] for name in inputs}


class _Reader:
    """The requests, one after the other, as onnxruntime asks for them."""

    def __init__(self, examples: Sequence[Feeds]) -> None:
        self._left: Iterator[Feeds] = iter(examples)

    def get_next(self) -> Any:
        """Return the next request, None behind the last one."""
        return next(self._left, None)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway quantize",
        description="Make an int8 model of a float32 one, by onnxruntime's static quantisation: uint8 activations, int8"
        " weights per channel, QuantizeLinear and DequantizeLinear around each operator.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="an .onnx file or a model directory (newest version)")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR",
        help="examples of requests: .npz files with an array for each input, or .npy files")  # fmt: skip
    parser.add_argument("--examples", type=int, default=200, metavar="N", help="of these, at most (%(default)s)")
    parser.add_argument("--method", choices=tuple(METHODS), default="minmax",
        help="how ranges follow from examples (%(default)s)")  # fmt: skip
    parser.add_argument("--keep", action="append", default=[], metavar="OPERATOR|NODE",
        help="leave these in float32, such as Softmax; may be given several times")  # fmt: skip
    parser.add_argument("--reduce-range", action="store_true",
        help="weights of 7 bits, for processors without VNNI")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FILE",
        help="where to write (NAME_int8/1/model.onnx beside a directory, NAME_int8.onnx beside a file)")  # fmt: skip
    return parser
