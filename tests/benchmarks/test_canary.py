"""What `make canary` installs and compares: requirements without upper bounds, who minds, and what failed."""

from packaging.requirements import Requirement

from benchmarks.packages.canary import CHECKS, changed, failures_of, file_of, minding, pins, requirements, unbounded
from testing.report import ROOT

PYPROJECT = """
[project]
name = "My_Own"
dependencies = ["one>=1,<2", "two~=3.4"]
[project.optional-dependencies]
all = ["my-own[more]", "three==5.0"]
more = ["four[grpc]>=1", "one"]
other = ["five"]
"""
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.wire.test_corpus" name="test_right[grpc]"/>
<testcase classname="tests.wire.test_corpus" name="test_left"><skipped message="no"/></testcase>
<testcase classname="tests.wire.test_corpus" name="test_wrong"><failure message="assert 1 == 2&#10;more"/></testcase>
<testcase classname="tests.wire.test_corpus" name="test_broken"><error message="no server"/></testcase>
</testsuite></testsuites>"""


def test_extras_are_followed_and_each_package_is_wanted_once() -> None:
    found = [str(each) for each in requirements(PYPROJECT, ["all"])]
    assert sorted(found) == ["four[grpc]>=1", "one<2,>=1", "three==5.0", "two~=3.4"]


def test_upper_bounds_go_and_exact_pins_stay() -> None:
    cases = {"a>=1,<2": "a>=1", "a~=3.4": "a>=3.4", "a==5.0": "a==5.0", "a[x]>=1,!=1.3,<=2": "a[x]!=1.3,>=1", "a": "a"}
    assert {text: str(unbounded(Requirement(text))) for text in cases} == cases


def test_our_own_requirements_can_be_read() -> None:
    names = {each.name for each in requirements((ROOT / "pyproject.toml").read_text(), ["all", "test"])}
    assert {"protobuf", "onnxruntime", "apache-tvm", "tritonclient"} <= names and "gangway-serve" not in names


def test_who_requires_another_version_is_told_also_of_an_extra() -> None:
    versions = {"proto": "7.1", "client": "2.0", "plain": "1.0"}
    required = {"client": ["proto<7; extra == 'grpc'"], "plain": ["proto<7; extra == 'grpc'", "proto>=6"]}
    rows = list(minding(versions, required, [Requirement("client[grpc]"), Requirement("plain")]))
    assert rows == [{"package": "client", "requires": "proto<7", "installed": "7.1"}]


def test_only_what_has_another_version_is_listed() -> None:
    wanted = [Requirement("a"), Requirement("b_c"), Requirement("absent")]
    assert list(changed({"a": "1", "b-c": "1"}, {"a": "1", "b-c": "2"}, wanted)) == [
        {"package": "b-c", "pinned": "1", "newest": "2"}
    ]


def test_pins_of_constraints_are_read() -> None:
    assert pins("# for tests\na==1.2\nB_c==3.post1  # why\n\n") == {"a": "1.2", "b-c": "3.post1"}


def test_failures_and_errors_are_read_with_their_first_line() -> None:
    failed = failures_of(JUNIT)
    assert failed.pop("") == "1 passed"
    assert failed == {
        "tests.wire.test_corpus::test_wrong": "assert 1 == 2",
        "tests.wire.test_corpus::test_broken": "no server",
    }
    assert {file_of(test) for test in failed} == {"tests/wire/test_corpus.py"}
    assert file_of("::tests.wire.test_corpus") == "tests/wire/test_corpus.py", "a file that cannot be imported"


def test_each_check_names_tests_that_are_there() -> None:
    assert all((ROOT / file).exists() for files in CHECKS.values() for file in files)
