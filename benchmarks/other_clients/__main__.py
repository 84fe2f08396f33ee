"""Clients that were made for other servers of the protocol: KServe's and MLServer's own.

Each library is installed into an environment of its own in `tools/clients`, which git ignores: they want other versions
of packages than we do. What is asked of them is in `client_kserve.py` and `client_mlserver.py`.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.fetching import TOOLS, FetchError, run, succeeds
from benchmarks.lib.live_server import LiveServer, live_server
from benchmarks.lib.report import Row, add_repository_option, option_parser, start_report
from benchmarks.lib.repository import ensure_zoo
from gangway.zoo import DEFAULT_NAMES

ROOT = TOOLS / "clients"
TIMEOUT_S = 300
MODELS = ("simple", "simple_string")


@dataclass(frozen=True)
class Library:
    """A client, what pip is to install for it, and the script that uses it."""

    requirements: tuple[str, ...]
    module: str
    script: str

    def python(self) -> Path:
        """Return the interpreter of its environment, which is made if it is not there. Raises FetchError."""
        folder = ROOT / self.module
        python = folder / "bin" / "python"
        if not (python.exists() and succeeds([str(python), "-c", f"import {self.module}"])):
            shutil.rmtree(folder, ignore_errors=True)
            run([sys.executable, "-m", "venv", str(folder)], "a virtual environment")
            pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            run([*pip, *self.requirements], " and ".join(self.requirements))
        return python


LIBRARIES: Mapping[str, Library] = {
    "kserve": Library(("kserve==0.21.0",), "kserve", "client_kserve.py"),
    "mlserver": Library(("mlserver==1.7.1",), "mlserver", "client_mlserver.py"),
}


def ask(name: str, server: LiveServer) -> list[Row]:
    """Return a row for each check of a library."""
    library = LIBRARIES[name]
    try:
        python = library.python()
    except FetchError as error:
        return [_row(name, "installation", str(error))]
    script = Path(__file__).with_name(library.script)
    command = [str(python), str(script), server.http_url, server.url]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return [_row(name, "all", f"no end within {TIMEOUT_S} s")]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    rows = [_row(name, line["check"], line["problem"]) for line in lines]
    return rows or [_row(name, "all", done.stderr.strip()[-300:])]


def _row(client: str, check: str, problem: str) -> Row:
    return {"client": client, "check": check, "result": problem or "pass"}


def ask_all(names: Sequence[str], server: LiveServer) -> list[Row]:
    """Return the rows of several libraries."""
    return [row for name in names for row in ask(name, server)]


def main() -> int:
    """Run every check; return 1 if one failed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--clients", nargs="+", default=list(LIBRARIES), choices=list(LIBRARIES), help="which clients")
    options = parser.parse_args()
    report = start_report("Other people's clients")
    with live_server(ensure_zoo(options.repository, sorted({*DEFAULT_NAMES, *MODELS}))) as server:
        rows = ask_all(options.clients, server)
    report.table("clients", rows)
    report.target("checks that failed", sum(row["result"] != "pass" for row in rows), 0)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
