"""Clients that were made for other servers of the protocol, and those of other languages, straight and through proxies.

KServe's and MLServer's libraries, and Python's HTTP clients, are installed into environments of their own in
`tools/clients`, which git ignores: they want other versions of packages than we do. The `programs` are built there,
too. What cannot be had is said in the table.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

from benchmarks.other_clients.generators import GENERATORS, ask_generator
from benchmarks.other_clients.messages import FORWARDED, write_python_models
from benchmarks.other_clients.programs import OVER_HTTP, PROGRAMS, ask_http
from benchmarks.other_clients.programs import ask as ask_program
from benchmarks.other_clients.proxies import HTTP_CONFIGURATIONS, PROXIES
from gangway.zoo import DEFAULT_NAMES
from testing.fetching import TOOLS, FetchError, run, succeeds
from testing.live_server import LiveServer, live_server
from testing.report import Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo

ROOT = TOOLS / "clients"
TIMEOUT_S = 300
MODELS = ("simple", "simple_string")


@dataclass(frozen=True)
class Library:
    """A client, what pip is to install for it, and the script that uses it."""

    requirements: tuple[str, ...]
    module: str
    script: str
    has_python_models: bool = False  # the server has those of `messages.py`, else Triton's examples

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
    "pytriton": Library(("nvidia-pytriton==0.7.0",), "pytriton", "client_pytriton.py", has_python_models=True),
}

HTTP = Library(("requests", "urllib3", "httpx[http2]", "aiohttp"), "aiohttp", "client_http.py")
STRAIGHT = "straight"


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


def _row(client: str, check: str, problem: str, through: str = STRAIGHT) -> Row:
    return {"client": client, "through": through, "check": check, "result": problem or "pass"}


def rows_of(client: str, found: Iterator[tuple[str, str]], through: str = STRAIGHT) -> Iterator[Row]:
    """Yield a row for each check of a program, or why it could not be run."""
    try:
        for check, problem in found:
            yield _row(client, check, problem, through)
    except FetchError as error:
        yield _row(client, "installation", str(error), through)


def ask_programs(names: Sequence[str], proxies: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of programs in other languages, without TLS and with it, through each proxy."""
    for name in names:
        if name == "python-http":
            yield from rows_of(name, _ask_python())
        elif name in OVER_HTTP:
            for through in [STRAIGHT, *HTTP_CONFIGURATIONS]:
                if through in proxies:
                    found = ask_http(OVER_HTTP[name](), "" if through == STRAIGHT else through)
                    yield from rows_of(name, found, through)
        elif name in GENERATORS:
            yield from rows_of(name, _ask_generator(name))
        elif name in PROGRAMS:
            for through, secure in product(proxies, (False, True)):
                found = ask_program(name, "" if through == STRAIGHT else through, secure)
                yield from rows_of(name, found, f"{through}, TLS" if secure else through)


def _ask_python() -> Iterator[tuple[str, str]]:
    script = Path(__file__).with_name(HTTP.script)
    yield from ask_http([str(HTTP.python()), str(script)])


def _ask_generator(name: str) -> Iterator[tuple[str, str]]:
    generator = GENERATORS[name]
    python = Library((generator.requirement,), generator.module, "").python()
    yield from ask_generator(generator, python)


def ask_libraries(names: Sequence[str], zoo: Path) -> Iterator[Row]:
    """Yield the rows of libraries, of servers with the models that they want; `zoo`: where Triton's examples are."""
    for has_python_models, group in groupby(
        sorted(names, key=lambda name: LIBRARIES[name].has_python_models),
        lambda name: LIBRARIES[name].has_python_models,
    ):
        with ExitStack() as stack:
            if has_python_models:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                flags = ["--model-control-mode=explicit", "--load-model=*", *FORWARDED]
                server = stack.enter_context(live_server(write_python_models(folder), flags))
            else:
                server = stack.enter_context(live_server(ensure_zoo(zoo, sorted({*DEFAULT_NAMES, *MODELS}))))
            for name in group:
                yield from ask(name, server)


def main() -> int:
    """Run every check; return 1 if one failed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    names = [*LIBRARIES, *GENERATORS, *PROGRAMS, *OVER_HTTP, "python-http"]
    add = parser.add_argument
    add("--clients", nargs="+", default=list(LIBRARIES), choices=names, help="which clients")
    add("--through", nargs="+", default=[STRAIGHT], choices=[STRAIGHT, *PROXIES], help="how programs reach the server")
    options = parser.parse_args()
    report = start_report("Other people's clients")
    libraries = [name for name in options.clients if name in LIBRARIES]
    rows = [*ask_libraries(libraries, options.repository), *ask_programs(options.clients, options.through)]
    report.table("clients", rows)
    report.target("checks that failed", sum(row["result"] != "pass" for row in rows), 0)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
