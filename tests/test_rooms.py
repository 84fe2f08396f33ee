"""The contract of the rooms: which may import which, how deep, and how large a file and a folder may be.

CONTRIBUTING.md explains it. A new arrow is a decision: whoever needs one changes `ARROWS` in the same commit.
"""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = (
    "artifact",
    "base",
    "clients",
    "cluster",
    "compiler",
    "executor",
    "measure",
    "protos",
    "python_backend",
    "scheduler",
    "server",
    "simulator",
    "workload",
    "zoo",
)
ARROWS: Mapping[str, set[str]] = {
    "base": set(),
    "artifact": {"base"},
    "protos": set(),
    "workload": set(),
    "zoo": {"base"},
    "compiler": {"artifact", "base"},
    "executor": {"artifact", "base", "python_backend"},
    "python_backend": set(),
    "scheduler": {"artifact", "base", "executor"},
    "simulator": {"artifact", "base", "executor", "scheduler", "workload"},
    "server": {"artifact", "base", "executor", "protos", "python_backend", "scheduler"},
    "measure": {
        "artifact",
        "base",
        "clients",
        "executor",
        "protos",
        "scheduler",
        "server",
        "simulator",
        "workload",
        "zoo",
    },
    "clients": {"artifact", "base", "protos", "workload"},
    "cluster": {"artifact", "base", "clients", "scheduler", "simulator", "workload"},
}
# The wall: front ends and the supervisor are processes on two sides of it, and meet in `messages` and what is below.
FRONT_END = ("server.serving",)
CONTROL = ("server.control",)
COMMAND_LINE = ("server.check", "server.cli", "server.serve_command")
# Packages that only one room, or only the modules named here, may import.
ONLY_IN = {
    "tvm": ("compiler",),
    "onnx": ("compiler", "zoo"),
    "h2": (),  # of tests
    "httptools": ("server.serving",),
    "ngh2": ("clients.raw_channel", "server.own_client", "server.serving.grpc.http2"),
    "uvloop": ("server.serving",),
}
# What is imported late, inside of a function, because it is heavy and seldom needed.
HEAVY = {
    "concurrent.futures",
    "fsspec",
    "gangway.scheduler.stages.schedule_file",
    "hashlib",
    "matplotlib",
    "matplotlib.figure",
    "numpy",
    "onnx.reference",
    "PIL",
    "tvm.relax.frontend.onnx",
}
MAX_FLOORS = 10  # of imports in server/
MAX_FILES = 25  # beside one another
MIN_LINES, MAX_LINES = 30, 800
# Small files, each with the reason why it is none of its neighbour's lines.
SMALL = {
    "server/serve_command.py": "is imported only when a server is started",
}


def sources() -> dict[str, Path]:
    """All modules of the product, as `room.module`."""
    found = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            if not path.stem.endswith("_pb2"):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


MODULES = sources()


def imports(module: str, late: bool = True) -> tuple[str, ...]:
    """What a module imports, full names. `late`: inside of functions, too. Imports for type checkers count."""
    early, others = imports_by_place(module)
    return (*early, *others) if late else early


@cache
def imports_by_place(module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a module imports at once, and inside of functions."""
    tree = ast.parse(MODULES[module].read_text())
    at_once = {id(node) for statement in tree.body for node in (statement, *ast.iter_child_nodes(statement))}
    early: list[str] = []
    late: list[str] = []
    for node in ast.walk(tree):
        found = early if id(node) in at_once else late
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append(whole if whole.removeprefix("gangway.") in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return tuple(early), tuple(late)


@cache
def ours(module: str) -> set[str]:
    """The modules of the product that a module imports."""
    return {name.removeprefix("gangway.") for name in imports(module) if name.startswith("gangway.")} & set(MODULES)


def room_of(module: str) -> str:
    """The room of a module."""
    return module.partition(".")[0]


def within(module: str, *packages: str) -> bool:
    """Whether a module is one of these, or in one of these packages."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_the_links_of_the_package_are_the_rooms() -> None:
    others = ("__main__.py", "__pycache__")
    links = {path.name: path for path in (ROOT / "gangway").iterdir() if path.name not in others}
    assert set(links) == set(ROOMS) == set(ARROWS)
    assert all(str(path.readlink()) == f"../{name}" for name, path in links.items())


def test_the_image_is_built_of_all_rooms() -> None:
    """`.dockerignore` lets in what it names, and nothing else."""
    named = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert named >= {*ROOMS, "gangway"}


def test_rooms_import_only_what_they_may() -> None:
    arrows = {(room_of(module), room_of(other)) for module in MODULES for other in ours(module)}
    new = {f"{room} -> {other}" for room, other in arrows if room != other and other not in ARROWS[room]}
    assert not new, "a new arrow between rooms"
    old = {(room, other) for room, others in ARROWS.items() for other in others}
    assert old <= arrows, "an arrow that nothing needs any more"


def test_the_wall_between_front_ends_and_supervisor() -> None:
    over = [
        f"{module} -> {other}"
        for module in MODULES
        for other in ours(module)
        if (within(module, *FRONT_END) and within(other, *CONTROL))
        or (within(module, *CONTROL) and within(other, *FRONT_END))
    ]
    assert not over
    below = [
        name for name in MODULES if room_of(name) == "server" and not within(name, *FRONT_END, *CONTROL, *COMMAND_LINE)
    ]
    up = [f"{name} -> {other}" for name in below for other in ours(name) if within(other, *FRONT_END, *CONTROL)]
    assert not up, "what both sides share imports one of them"


@pytest.mark.parametrize("package", ONLY_IN)
def test_packages_that_only_some_import(package: str) -> None:
    strangers = {
        name
        for name in MODULES
        for other in imports(name)
        if within(other, package) and not within(name, *ONLY_IN[package])
    }
    assert not strangers


def test_classes_have_names_of_their_own() -> None:
    """Public ones. Those of `python_backend` live in other environments and repeat names of Triton's."""
    by_name: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        if room_of(module) != "python_backend":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    by_name.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in by_name.items() if len(modules) > 1}


def test_nothing_imports_in_circles() -> None:
    finished: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in finished:
            for other in sorted(ours(module) - {module}):
                visit(other, (*path, module))
            finished.add(module)

    for module in MODULES:
        visit(module, ())


def test_late_imports_are_of_what_is_heavy() -> None:
    """Inside of a function only what takes long to import, or a module that imports such a thing itself."""
    light = [
        f"{module}: {name}"
        for module in MODULES
        for name in set(imports(module)) - set(imports(module, late=False))
        if name not in HEAVY and not (name.startswith("gangway.") and is_heavy(name.removeprefix("gangway.")))
    ]
    assert not light


@cache
def is_heavy(module: str) -> bool:
    """Whether it imports, itself or by others, more than the standard library and the smallest of packages."""
    slow = {
        "numpy",
        "onnx",
        "onnxruntime",
        "tvm",
        "matplotlib",
        "rich",
        "grpc",
        "ngh2",
        "uvloop",
        "opentelemetry",
        "mlperf_loadgen",
    }
    early = set(imports(module, late=False))
    if any(name.partition(".")[0] in slow for name in early):
        return True
    return any(is_heavy(name.removeprefix("gangway.")) for name in early if name.removeprefix("gangway.") in MODULES)


def test_how_deep_the_server_is() -> None:
    @cache
    def floors(module: str) -> tuple[str, ...]:
        below = [floors(other) for other in ours(module) if room_of(other) == "server" and other != module]
        return (module, *max(below, key=len, default=()))

    deepest = max((floors(module) for module in MODULES if room_of(module) == "server"), key=len)
    assert len(deepest) <= MAX_FLOORS, " -> ".join(deepest)


def test_sizes_of_files_and_folders() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in MODULES.values()}
    small = {name for name, count in lines.items() if count < MIN_LINES and not name.endswith("__init__.py")}
    assert small == set(SMALL)
    assert not {name for name, count in lines.items() if count > MAX_LINES}
    folders = [str(Path(name).parent) for name in lines]
    assert not {folder for folder in folders if folders.count(folder) > MAX_FILES}


# What a folder beside the rooms imports of the others; `tests/benchmarks` imports all.
BESIDE: Mapping[str, set[str]] = {"testing": {"testing"}, "tests": {"testing", "tests"}}
IMPORT = re.compile(r"^ *(?:from|import) ((benchmarks|testing|tests)[\w.]*)", re.MULTILINE)


def test_tests_and_benchmarks_meet_in_testing() -> None:
    for folder in (*ROOMS, *BESIDE, "benchmarks", "docs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found = IMPORT.findall(path.read_text())
            for module in {module.replace(".", "/") for module, _ in found}:
                assert (ROOT / f"{module}.py").exists() or (ROOT / module).is_dir(), (path, module)
            if folder not in ("benchmarks", "docs") and not path.is_relative_to(ROOT / "tests/benchmarks"):
                assert {room for _, room in found} <= BESIDE.get(folder, set()), path


def test_comments_name_files_that_exist() -> None:
    """Files of ours in backquotes, by the end of their path: `messages.py`, `supervisor/exporter.py`."""
    known = {
        f"/{path.relative_to(ROOT)}"
        for folder in (*ROOMS, "benchmarks", "docs", "testing")
        for path in (ROOT / folder).rglob("*.py")
    }
    missing = {
        f"{module}: {name}"
        for module, path in MODULES.items()
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", path.read_text())
        if not any(each.endswith(f"/{name}") for each in known)
    }
    assert not missing
