"""The newest release of every dependency, before people have it: does all still hold, and at which speed?

`make canary` makes an environment in `build/canary`, beside a copy of this checkout. It has the newest releases within
the names of pyproject.toml and above its lower bounds, but without its upper ones; an exact pin there has a reason, and
stays. Bounds of other packages do not count: a table says who minds. Tests of operators, of the wire and of real
clients run there. What fails there runs again, and here: it is new only if it fails twice and passes here. The speed of
a server of either environment is measured by turns. Rows are kept as each part ends: `--reuse` goes on from there.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from benchmarks.front_end.own_cores import ROLES, Stretch, measure
from benchmarks.packages.kept_rows import KeptRows
from testing.fetching import FetchError, run
from testing.live_server import live_server
from testing.reference import example_of
from testing.report import ROOT, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

FOLDER = ROOT / "build" / "canary"
TREE = FOLDER / "tree"
ROWS = FOLDER / "rows.json"
EXTRAS = ("all", "remote", "test", "bench")
UPPER = ("<", "<=", "~=", "==", "===")
CHECK_TIMEOUT_S = 1800
NO_END = "all"  # of tests that have no end, or no result
CLIENTS, CONNECTIONS = 1, 4  # processes of the load, and connections of each
MODELS = ("mlp", "mobilenetv2")  # what requests cost, and what kernels cost

CHECKS: Mapping[str, Sequence[str]] = {
    "wire corpus": ("tests/wire", "tests/protos"),
    "clients": (
        "tests/serving/clients/test_client_methods.py",
        "tests/serving/clients/test_real_clients.py",
        "tests/serving/clients/test_embeddings.py",
        "tests/clients",
    ),
    "operators": (
        "tests/benchmarks/test_conformance.py",
        "tests/compiler/test_newer_stamps.py",
        "tests/compiler/test_fallback.py",
        "tests/benchmarks/test_differences.py",
    ),
    "files and options": ("tests/artifact", "tests/server/options"),
    "stores, spans, completion": (
        "tests/serving/repository/test_remote.py",
        "tests/server/tracing",
        "tests/server/test_completion.py",
    ),
    "layers": ("tests/compiler/comparison/test_agreement.py", "tests/compiler/lower"),
}


@dataclass(frozen=True)
class Environment:
    """An interpreter, and the checkout whose Gangway it has installed."""

    name: str
    python: Path
    tree: Path

    def versions(self) -> dict[str, str]:
        """Return what pip lists, by canonical name."""
        listed = subprocess.check_output([str(self.python), "-m", "pip", "list", "--format=json"], text=True)
        return {canonicalize_name(each["name"]): each["version"] for each in json.loads(listed)}

    def required(self) -> dict[str, list[str]]:
        """Return what each package says that it requires, by its canonical name."""
        code = (
            "import importlib.metadata as m, json; print(json.dumps({d.name: d.requires for d in m.distributions()}))"
        )
        told = json.loads(subprocess.check_output([str(self.python), "-c", code], text=True))
        return {canonicalize_name(name): texts or [] for name, texts in told.items()}

    def test(self, files: Sequence[str]) -> dict[str, str]:
        """Run tests; return what each said that did not pass, by its name, and under "" how many passed.

        Raises FetchError if they have no end, or no result.
        """
        results = FOLDER / f"{self.name}.xml"
        results.unlink(missing_ok=True)
        command = [str(self.python), "-m", "pytest", "-q", "--tb=line", "-m", "not image and not ray and not long"]
        command += ["-p", "no:cacheprovider", f"--junit-xml={results}", *files]
        log = FOLDER / f"{self.name}.log"
        with (
            log.open("w") as output,
            subprocess.Popen(
                command, cwd=self.tree, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            ) as tests,
        ):
            try:
                tests.wait(CHECK_TIMEOUT_S)
            except BaseException as error:
                os.killpg(tests.pid, signal.SIGKILL)  # with the servers that they have started
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise FetchError(f"no end of the tests within {error.timeout:.0f} s") from error
        if not results.exists():
            raise FetchError(f"no result of the tests: {log.read_text()[-500:]}")
        return failures_of(results.read_text())


def failures_of(junit: str) -> dict[str, str]:
    """Return the first line of each test that failed, by its name, and under "" how many passed."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    failed: dict[str, str] = {}
    skipped = 0
    for case in cases:
        skipped += case.find("skipped") is not None
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                lines = (found.get("message") or found.text or kind).strip().splitlines()
                failed[f"{case.get('classname')}::{case.get('name')}"] = lines[0] if lines else kind
    return {"": f"{len(cases) - len(failed) - skipped} passed", **failed}


def requirements(pyproject: str, extras: Iterable[str]) -> list[Requirement]:
    """Return what a project needs, with these of its extras, and those that they name in turn; each package once."""
    project = tomllib.loads(pyproject)["project"]
    own = canonicalize_name(project["name"])
    waiting = [Requirement(text) for text in project["dependencies"]]
    waiting += [Requirement(f"{own}[{','.join(extras)}]")]
    found: dict[str, Requirement] = {}
    while waiting:
        each = waiting.pop(0)
        if canonicalize_name(each.name) == own:
            waiting += [Requirement(text) for extra in each.extras for text in project["optional-dependencies"][extra]]
        elif canonicalize_name(each.name) not in found or each.extras:
            found[canonicalize_name(each.name)] = each
    return list(found.values())


def unbounded(requirement: Requirement) -> Requirement:
    """Return a requirement without its upper bounds, unless it is an exact pin: `~=1.4` becomes `>=1.4`."""
    if len(requirement.specifier) == 1 and all(each.operator == "==" for each in requirement.specifier):
        return requirement
    lower = [f">={each.version}" if each.operator == "~=" else str(each) for each in requirement.specifier]
    kept = [text for text in lower if not text.startswith(UPPER)]
    freed = Requirement(str(requirement))
    freed.specifier = SpecifierSet(",".join(kept))
    return freed


def pins(constraints: str) -> dict[str, str]:
    """Return the versions that a file of constraints has, by canonical name."""
    lines = (line.partition("#")[0].partition("==") for line in constraints.splitlines())
    return {canonicalize_name(name): version.strip() for name, _, version in lines if version}


def make_newest(wanted: Sequence[Requirement], reuse: bool) -> Environment:
    """Make the environment, or `reuse` the one that is there, with today's checkout. Raises FetchError."""
    python = FOLDER / "venv" / "bin" / "python"
    if not reuse:
        shutil.rmtree(FOLDER, ignore_errors=True)
    copy_checkout()
    if reuse:
        return Environment("newest", python, TREE)
    run([sys.executable, "-m", "venv", str(FOLDER / "venv")], "a virtual environment")
    run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"], "uv")
    overrides = FOLDER / "overrides.txt"
    overrides.write_text("".join(f"{each}\n" for each in wanted))
    install = [str(python), "-m", "uv", "pip", "install", "--quiet", f"--python={python}"]
    run([*install, f"--override={overrides}", "pip", *map(str, wanted)], "the newest releases")
    run([*install, "--no-deps", "--editable", str(TREE)], "Gangway")
    return Environment("newest", python, TREE)


def copy_checkout() -> None:
    """Copy what git knows of this checkout, as it is now: another environment builds other extensions into it."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, names):
        source, target = ROOT / name, TREE / name
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    if not (TREE / "tools").is_symlink():
        (TREE / "tools").symlink_to(ROOT / "tools")


def changed(old: Mapping[str, str], new: Mapping[str, str], wanted: Sequence[Requirement]) -> Iterator[Row]:
    """Yield a row for each package that is wanted and has another version."""
    for name in sorted(canonicalize_name(each.name) for each in wanted):
        if name in new and old.get(name) != new[name]:
            yield {"package": name, "pinned": old.get(name, "none"), "newest": new[name]}


def minding(
    versions: Mapping[str, str], required: Mapping[str, Sequence[str]], wanted: Sequence[Requirement]
) -> Iterator[Row]:
    """Yield a row for each package that requires another version, also by an extra, which `pip check` omits."""
    extras: dict[str, set[str]] = {canonicalize_name(each.name): each.extras for each in wanted}
    for package, texts in sorted(required.items()):
        for each in map(Requirement, texts):
            name, places = canonicalize_name(each.name), [{"extra": extra} for extra in ("", *extras.get(package, ()))]
            applies = each.marker is None or any(map(each.marker.evaluate, places))
            if applies and name in versions and not each.specifier.contains(versions[name], prereleases=True):
                yield {"package": package, "requires": f"{each.name}{each.specifier}", "installed": versions[name]}


def check_rows(pinned: Environment, newest: Environment, name: str) -> Iterator[Row]:
    """Yield a row for a check, and one for each test of it that fails with the newest releases."""
    print(f"{name}: {' '.join(CHECKS[name])}", flush=True)
    begin = time.monotonic()
    failed = outcome(newest, CHECKS[name])
    passed = failed.pop("")
    print(f"  {passed}", *(f"  {test}: {line}" for test, line in failed.items()), sep="\n", flush=True)
    summary = f"{passed}, {len(failed)} failed in {time.monotonic() - begin:.0f} s"
    yield {"check": name, "result": summary, "again": "", "pinned": ""}
    files = CHECKS[name] if NO_END in failed else sorted({file_of(test) for test in failed})
    again, before = (outcome(side, files) if failed else {} for side in (newest, pinned))
    for test, line in failed.items():
        ends = {side: "fails" if test in found else "passes" for side, found in (("again", again), ("pinned", before))}
        yield {"check": test, "result": line[:200], **ends}


def outcome(environment: Environment, files: Sequence[str]) -> dict[str, str]:
    """Return what `Environment.test` does; tests without an end are one that failed."""
    try:
        return environment.test(files)
    except FetchError as error:
        return {"": "none passed", NO_END: str(error)}


def file_of(test: str) -> str:
    """Return the file of a test as the junit file names it: `tests.wire.test_x::test`, or `::tests.wire.test_x`."""
    module, _, name = test.partition("::")
    return (module or name).replace(".", "/") + ".py"


def speed_rows(
    environments: Sequence[Environment], repository: Path, models: Sequence[str], rounds: int, seconds: float
) -> Iterator[Row]:
    """Yield a row for each model: medians of both environments by turns, and their ratio."""
    ensure_zoo(repository, models)
    examples = {model: example_of(model, onnx_file(repository, model)) for model in models}
    with ExitStack() as stack:
        flags = ["--model-control-mode=explicit", *(f"--load-model={model}" for model in models)]
        servers = [
            stack.enter_context(live_server(repository, flags, cwd=each.tree, python=str(each.python)))
            for each in environments
        ]
        for model in models:
            taken: list[list[Stretch]] = [[] for _ in servers]
            for at in range(rounds):
                order = range(len(servers)) if at % 2 == 0 else reversed(range(len(servers)))
                for side in order:
                    taken[side].append(measure(servers[side], examples[model], CLIENTS, CONNECTIONS, seconds))
            old, new = (statistics.median(map(cpu_us, stretches)) for stretches in taken)
            ratios = [cpu_us(b) / cpu_us(a) for a, b in zip(*taken, strict=True)]
            yield {
                "model": model,
                "pinned, CPU us a request": old,
                "newest": new,
                "ratio": statistics.median(ratios),
                "spread": f"{min(ratios):.2f} to {max(ratios):.2f}",
            }


def cpu_us(stretch: Stretch) -> float:
    """Return the CPU time that a server spent for each request, in microseconds."""
    return sum(stretch.cpu_ns[role] for role in ROLES) / stretch.requests / 1e3


def main() -> int:
    """Make the environment, check and measure; return 1 if something fails that passes with the pinned versions."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--checks", nargs="*", default=list(CHECKS), choices=list(CHECKS), help="which checks")
    parser.add_argument("--reuse", action="store_true", help="environment and rows that an earlier run has made")
    parser.add_argument("--anew", nargs="*", default=[], metavar="PART", help="made again: checks, speed")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="of the zoo, for the speed")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each environment, for the speed; 0: none")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below nohup, which tests would inherit
    report = start_report("The newest release of every dependency")
    wanted = [unbounded(each) for each in requirements((ROOT / "pyproject.toml").read_text(), EXTRAS)]
    pinned = Environment("pinned", Path(sys.executable), ROOT)
    try:
        newest = make_newest(wanted, options.reuse)
        tested = {**pins((ROOT / "constraints.txt").read_text()), **pinned.versions()}
        report.table("versions", list(changed(tested, newest.versions(), wanted)))
        report.table("who wants others", list(minding(newest.versions(), newest.required(), wanted)))
    except FetchError as error:
        sys.exit(f"canary: {error}")
    kept = KeptRows(ROWS)
    checks: list[Row] = []
    for name in options.checks:
        checks += kept.of(name, partial(check_rows, pinned, newest, name), name in options.anew)
    report.table("checks", checks)
    if options.rounds:
        sides = (pinned, newest)
        measured = partial(speed_rows, sides, options.repository, options.models, options.rounds, options.seconds)
        report.table("speed by turns", kept.of("speed", measured, "speed" in options.anew))
    new = [row for row in checks if (row["again"], row["pinned"]) == ("fails", "passes")]
    report.target("fails with the newest releases only", len(new), 0)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
