"""What a package says of itself: bounds that the pins meet, extras that exist, and extensions for every Python."""

import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gangway.base.extras import COMPILER, EXTRAS, install_command, missing_packages
from gangway.executor import _native, _probes

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
USERS_EXTRAS = ("client", "compile", "completion", "embeddings", "extensions", "onnxruntime", "otel", "perf", "report")
DEPENDENCIES = [
    Requirement(text)
    for text in (*PROJECT["dependencies"], *(text for name in USERS_EXTRAS for text in OPTIONAL[name]))
    if not text.startswith("gangway-serve")
]


def pins() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return {canonicalize_name(name): pin for name, _, pin in (line.partition("==") for line in lines if line)}


@pytest.mark.parametrize("dependency", DEPENDENCIES, ids=str)
def test_every_dependency_has_bounds_that_its_pin_meets(dependency: Requirement) -> None:
    assert dependency.specifier.contains(pins()[canonicalize_name(dependency.name)])
    assert not dependency.specifier.contains("9999"), "no upper bound"
    assert not dependency.specifier.contains("0.0.1"), "no lower bound"


def test_protobuf_is_admitted_where_tritonclient_admits_it() -> None:
    """Both are in one environment of many users. Others have protobuf 7, which `make canary` tried; never 8."""
    wanted = [Requirement(text) for text in requires("tritonclient") or []]
    (theirs,) = (
        each.specifier
        for each in wanted
        if each.name == "protobuf" and each.marker is not None and each.marker.evaluate({"extra": "grpc"})
    )
    (ours,) = (each.specifier for each in DEPENDENCIES if each.name == "protobuf")
    versions = (pins()["protobuf"], "6.99", "7.0", "7.36.2", "8.0")
    assert [ours.contains(each) for each in versions] == [True, True, True, True, False]
    assert all(ours.contains(each) for each in versions if theirs.contains(each))
    assert theirs.contains(pins()["protobuf"])


def test_errors_name_extras_that_exist() -> None:
    assert set(EXTRAS.values()) <= set(OPTIONAL)
    (everything,) = (Requirement(text) for text in OPTIONAL["all"])
    assert everything.extras == set(USERS_EXTRAS) >= set(EXTRAS.values())
    assert install_command(COMPILER) == "pip install 'gangway-serve[compile]'"
    assert missing_packages(COMPILER) == ""


def test_extensions_are_for_every_python() -> None:
    for module in (_native, _probes):
        assert str(module.__file__).endswith(".abi3.so") and ".abi3.so" in EXTENSION_SUFFIXES


def test_the_package_is_a_command() -> None:
    shown = subprocess.check_output([sys.executable, "-m", "gangway", "--version"], text=True)
    assert shown == f"gangway {version('gangway-serve')}\n"
