"""Triton's public client examples against a Gangway server: which of them pass.

    git clone https://github.com/triton-inference-server/client
    python -m benchmarks.other_clients.triton_examples --examples client/src/python/examples

Nothing of theirs is changed. The server has the models that `gangway zoo DIR examples` writes, and two more that some
scripts name, and is called `triton`, as one of them demands. A script passes if it ends with status 0.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks.other_clients.triton_example_list import DEFAULT_PORTS, IMAGE, Example, examples_of
from benchmarks.other_clients.triton_example_models import write_integer_identity, write_photo_model
from gangway.zoo import write_model
from gangway.zoo.catalog import MODELS
from testing.live_server import live_server
from testing.report import Row, option_parser, start_report

TIMEOUT_S = 120
PASSED, FAILED, NOT_APPLICABLE = "passed", "FAILED", "not applicable"
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


@dataclass(frozen=True)
class Outcome:
    """How one call ended. `detail`: why it is not applicable, or the last line that it wrote."""

    example: Example
    result: str
    detail: str

    def row(self) -> Row:
        """Return the outcome as a row of the table."""
        return {"example": self.example.title, "protocol": self.example.protocol, "": self.result, "why": self.detail}


def run_example(example: Example, folder: Path, urls: Mapping[str, str], picture: Path) -> Outcome:
    """Run one call in an empty folder of its own."""
    if reason := example.not_applicable or _unreachable(example, urls):
        return Outcome(example, NOT_APPLICABLE, reason)
    arguments = [str(picture) if argument == IMAGE else argument for argument in example.arguments]
    address = ["-u", urls[example.protocol]] if example.takes_url else []
    command = [sys.executable, str(folder / example.script), *address, *arguments]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            cwd=picture.parent,
        )
    except subprocess.TimeoutExpired:
        return Outcome(example, FAILED, f"it did not end within {TIMEOUT_S} s")
    if missing := _MISSING.search(done.stdout):
        return Outcome(example, NOT_APPLICABLE, f"package {missing[1]} is not installed")
    lines = done.stdout.strip().splitlines() or [""]
    return Outcome(example, FAILED if done.returncode else PASSED, lines[-1][:120] if done.returncode else "")


def _unreachable(example: Example, urls: Mapping[str, str]) -> str:
    if not urls[example.protocol]:
        return f"the server does not speak {example.protocol}"
    port = DEFAULT_PORTS[example.protocol]
    if not example.takes_url and not urls[example.protocol].endswith(f":{port}"):
        return f"it speaks to port {port} only"
    return ""


@contextmanager
def repository(models: int = 0) -> Iterator[Path]:
    """Write the models that the examples ask for; or so many models, the first of those and as small ones as can be."""
    with tempfile.TemporaryDirectory() as folder:
        served = Path(folder)
        examples = [name for name, entry in MODELS.items() if entry.module == "examples"]
        for name in examples[: models or None]:
            write_model(served, name)
        if not models:
            write_photo_model(served, "densenet_onnx")
            write_integer_identity(served, "custom_identity_int32")
        for number in range(models - len(examples)):
            write_integer_identity(served, f"identity_{number}")
        yield served


def run_all(examples: Sequence[Example], folder: Path) -> list[Outcome]:
    """Run every call, in order, against the server that it needs."""
    outcomes: dict[Example, Outcome] = {}
    with tempfile.TemporaryDirectory() as scratch:
        picture = Path(scratch) / "red.png"
        Image.new("RGB", (80, 60), (200, 30, 20)).save(picture)
        for models in sorted({example.explicit for example in examples}):
            flags = ["--id=triton", *(["--model-control-mode=explicit"] if models else [])]
            wanted = [example for example in examples if example.explicit == models]
            with repository(models) as folder_of_models, live_server(folder_of_models, flags) as server:
                urls = {"grpc": server.url, "http": server.http_url}
                for example in wanted:
                    outcomes[example] = run_example(example, folder, urls, picture)
                    print(f"{outcomes[example].result:>14}  {example.title}", flush=True)
    return [outcomes[example] for example in examples]


def main() -> int:
    """Print a table; return 0 if nothing failed."""
    parser = option_parser("Run Triton's public client examples against a Gangway server.")
    parser.add_argument("--examples", type=Path, required=True, metavar="DIR", help="folder of the scripts")
    parser.add_argument("--only", default="", metavar="TEXT", help="only scripts whose names contain this")
    options = parser.parse_args()
    scripts = sorted(path.name for path in options.examples.glob("*.py") if options.only in path.name)
    if not scripts:
        parser.error(f"argument --examples: {options.examples} has no such script")
    report = start_report("Triton's public client examples")
    outcomes = run_all(examples_of(scripts), options.examples.resolve())
    report.table("examples", [outcome.row() for outcome in outcomes])
    counts = Counter(outcome.result for outcome in outcomes)
    report.table("in all", [{"result": result, "calls": counts[result]} for result in (PASSED, FAILED, NOT_APPLICABLE)])
    report.target("calls that failed", counts[FAILED], 0)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
