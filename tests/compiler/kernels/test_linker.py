"""What is linked without the system's linker: as a C compiler means it, or refused with a reason."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.linker import LinkError, link, undefined
from gangway.compiler.kernels.plain_specs import Instruction, Operand, PointwiseSpec
from gangway.compiler.kernels.templates import registry
from tests.helpers.kernel_runs import build

FIRST = """
#include <string.h>
static const char *const words[] = {"zero", "one", "two"};   /* pointers in data */
static int counter;                                          /* zeros */
int shared = 40;
__attribute__((weak)) int which(void) { return 1; }
int second(int);
int first(int x) { return second(x) + ++counter; }           /* of another object */
const char *word(int x) { return words[x]; }
unsigned long length(const char *text) { return strlen(text); }
int which_here(void) { return which(); }
int jump(int x) {
    switch (x) { case 0: return 7; case 1: return 3; case 2: return 9; case 3: return 4; case 4: return 1; case 5: return 8; }
    return -1;
}
"""  # noqa: E501
SECOND = """
#include <stdio.h>
extern int shared;                                           /* a variable of another object: by the table of offsets */
extern FILE *stderr;                                         /* one of the C library */
int which(void) { return 2; }
int second(int x) { return x + shared; }
int is_error(FILE *file) { return file == stderr; }
void *address(void) { return stderr; }
"""


def compiled(folder: Path, name: str, source: str, *flags: str) -> Path:
    path = folder / f"{name}.c"
    path.write_text(source)
    made = path.with_suffix(".o")
    subprocess.run(["gcc", "-c", "-O2", "-fPIC", *flags, "-o", made, path], check=True, timeout=30)
    return made


@pytest.fixture
def library_path(tmp_path: Path) -> Path:
    """None that is kept: tests look at the file that has just been built."""
    return tmp_path / "kernels.so"


def test_objects_of_a_c_compiler_work_together(tmp_path: Path) -> None:
    objects = [compiled(tmp_path, "first", FIRST), compiled(tmp_path, "second", SECOND, "-g")]
    assert undefined(objects[0]) >= {"second", "strlen"}
    link(objects, tmp_path / "both.so")
    both = ctypes.CDLL(str(tmp_path / "both.so"))
    both.word.restype, both.address.restype = ctypes.c_char_p, ctypes.c_void_p
    assert [both.first(1), both.first(1)] == [42, 43]
    assert [both.word(number) for number in range(3)] == [b"zero", b"one", b"two"]
    assert both.length(b"five!") == 5
    assert both.which_here() == 2  # the strong one
    assert [both.jump(number) for number in range(-1, 7)] == [-1, 7, 3, 9, 4, 1, 8, -1]
    assert both.is_error(ctypes.c_void_p(both.address())) and both.address()


def test_a_library_is_as_tools_and_loaders_expect_it(tmp_path: Path) -> None:
    link([compiled(tmp_path, "first", FIRST), compiled(tmp_path, "second", SECOND)], tmp_path / "both.so")
    command = ["readelf", "--wide", "--all", str(tmp_path / "both.so")]
    read = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert not read.stderr  # readelf complains of all that does not fit together
    segments = [line.split() for line in read.stdout.splitlines() if line.split()[:1] in (["LOAD"], ["GNU_STACK"])]
    assert not any("W" in flags and "E" in flags for flags in (words[6:-1] for words in segments))
    disassembly = subprocess.run(
        ["objdump", "-d", str(tmp_path / "both.so")], capture_output=True, text=True, check=True
    )
    assert "<which_here>:" in disassembly.stdout


@pytest.mark.parametrize(
    "sources, flags, reason",
    [
        ((FIRST, FIRST.replace("int first", "int other")), (), "second time"),
        (("_Thread_local int mine = 1; int *where(void) { return &mine; }",), (), "for each thread"),
        (("int table[9]; int at(int x) { return table[x]; }",), ("-fno-pic", "-mcmodel=large"), "relocation of type"),
        (("int common;",), ("-fcommon",), "common symbol"),
    ],
)
def test_what_cannot_be_linked_is_refused_by_name(
    tmp_path: Path, sources: tuple[str, ...], flags: tuple[str, ...], reason: str
) -> None:
    objects = [compiled(tmp_path, f"part{number}", source, *flags) for number, source in enumerate(sources)]
    with pytest.raises(LinkError, match=rf"part\d\.o.*{reason}"):
        link(objects, tmp_path / "library.so")


def test_a_file_that_is_no_whole_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=r"missing\.o: No such file"):
        link([tmp_path / "missing.o"], tmp_path / "kernels.so")
    whole = compiled(tmp_path, "whole", FIRST).read_bytes()
    cut = tmp_path / "cut.o"
    for size in range(0, len(whole), 61):
        cut.write_bytes(whole[:size])
        with pytest.raises(LinkError, match=r"cut\.o"):
            link([cut], tmp_path / "kernels.so")


def test_kernels_are_compiled_without_any_program_of_the_system(
    target: TargetSpec, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    spec = PointwiseSpec((16,), (Operand("int32", (1,)),) * 2, (Instruction("add", (0, 1), "int32"),))
    build({"k": registry.plan(spec, target)}, target, library_path)
    assert library_path.exists()
