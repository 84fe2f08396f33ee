"""Build: the protocol files become modules, executor/native becomes an extension, and so does what decides.

The extensions of C use Python's stable ABI. That of the scheduler, which mypyc makes of Python, does not, so each
version of Python has a wheel of its own. A wheel is made in a temporary folder: what an earlier build has left in the
checkout gets into none, and the checkout may be read-only.
"""

import atexit
import os
import re
import runpy
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
C_FLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
PROTOS = Path("gangway", "protos")
SCHEDULER = runpy.run_path(str(ROOT / "gangway" / "scheduler" / "compiled.py"))
PACKAGES = ["gangway", *(f"gangway.{name}" for name in find_packages("gangway"))]


def generate_protos(target_folder: Path) -> None:
    """Write *_pb2.py(i). `-I protos` names the files as Triton's clients do, so both load in one process."""
    from grpc_tools import protoc

    folder = ROOT / PROTOS
    sources = sorted(folder.glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{folder}", f"--python_out={scratch}", f"--pyi_out={scratch}", *map(str, sources)]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed")
        for made in sorted(Path(scratch).glob("*_pb2.py*")):
            # protoc assumes the folder is on sys.path; ours are modules of a package.
            text = re.sub(r"^import (\w+_pb2)", r"from gangway.protos import \1", made.read_text(), flags=re.MULTILINE)
            target = target_folder / made.name
            if not target.exists() or target.read_text() != text:
                target.write_text(text)


class BuildPy(build_py):
    def run(self) -> None:
        if self.editable_mode:
            generate_protos(ROOT / PROTOS)
        super().run()
        if not self.editable_mode:
            generate_protos(Path(self.build_lib) / PROTOS)


class BuildExt(build_ext):
    def run(self) -> None:
        self.is_for_checkout = self.inplace  # which is not so while extensions are built
        super().run()
        if not self.inplace:
            return
        for path in ROOT.glob("gangway/executor/_*.cpython-*.so"):  # which an import prefers
            path.unlink()
        fitting = Path(self.get_ext_filename(compiled.name)).name
        for path in ROOT.glob(f"gangway/scheduler/compiled_*{sysconfig.get_config_var('EXT_SUFFIX')}"):
            if path.name != fitting:  # of other sources
                path.unlink()

    def build_extension(self, ext: Extension) -> None:
        if ext is compiled:
            made = ROOT / self.get_ext_filename(ext.name)
            if self.is_for_checkout and made.exists():  # of the same sources
                target = Path(self.get_ext_fullpath(ext.name))
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(made, target)
                return
            translate(ext)
            self._compile_side_by_side(ext)
        super().build_extension(ext)

    def _compile_side_by_side(self, ext: Extension) -> None:
        """Compile the sources of an extension on two cores, so that it only has to be linked."""

        def compile_one(source: str) -> list[str]:
            options = {"include_dirs": ext.include_dirs, "extra_postargs": ext.extra_compile_args}
            return self.compiler.compile([source], output_dir=self.build_temp, **options)

        largest_first = sorted(ext.sources, key=os.path.getsize, reverse=True)
        with ThreadPoolExecutor(2) as pool:
            ext.extra_objects = [made for each in pool.map(compile_one, largest_first) for made in each]
        ext.sources = []


def translate(ext: Extension) -> None:
    """Give an extension the C that mypyc makes of the scheduler's modules, and one `PyInit` for each of them."""
    from mypyc.build import mypycify

    names = [f"gangway.scheduler.{name}" for name in SCHEDULER["MODULES"]]
    options = [
        "--config-file=",
        "--cache-dir=/dev/null",
        "--namespace-packages",
        "--explicit-package-bases",
        "--follow-imports=silent",
    ]
    paths = [f"{name.replace('.', os.sep)}.py" for name in names]
    made, *_ = mypycify(
        [*options, "--ignore-missing-imports", *paths],
        opt_level="1",  # with 2 the build takes 10 s more, for decisions that take 2 % less
        debug_level="0",
        multi_file=True,
        target_dir=f"{scratch}/mypyc",
        group_name=ext.name.removesuffix("__mypyc"),
    )
    entries = Path(scratch, "entries.c")
    lines = ["#include <Python.h>"]
    for name in names:
        made_name = f"CPyInit_{name.replace('.', '___')}"
        lines.append(f"PyObject *{made_name}(void);")
        lines.append(f"PyMODINIT_FUNC PyInit_{name.rpartition('.')[2]}(void) {{ return {made_name}(); }}")
    entries.write_text("\n".join(lines))
    ext.sources = [*made.sources, str(entries)]
    ext.include_dirs = [*made.include_dirs, f"{scratch}/mypyc/gangway/scheduler"]
    ext.extra_compile_args = [flag for flag in made.extra_compile_args if flag != "-Werror"]  # it is not our C


def extension(name: str, sources: str, flags: Sequence[str] = ()) -> Extension:
    return Extension(
        f"gangway.executor.{name}",
        sources=sorted(glob(f"gangway/executor/{sources}/*.c", root_dir=ROOT)),
        depends=sorted(glob(f"gangway/executor/{sources}/*.h", root_dir=ROOT)),
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        extra_compile_args=[*C_FLAGS, *flags],
    )


native = extension("_native", "native")
probes = extension("_probes", "probes", ["-ffp-contract=fast"])  # with fused multiply-adds
compiled = Extension(SCHEDULER["extension_name"](ROOT / "gangway"), sources=[])  # `translate` finds them

scratch = tempfile.mkdtemp()
atexit.register(shutil.rmtree, scratch, ignore_errors=True)

setup(
    packages=PACKAGES,
    include_package_data=False,  # C sources are of no use in a wheel
    package_data={
        **{package: ["*.pyi", "py.typed"] for package in PACKAGES[1:]},
        "gangway.protos": ["*.proto", "*.pyi", "py.typed"],
        "gangway.server.serving.http": ["*.html", "*.css", "*.js", "*.pyi", "py.typed"],
        "gangway.simulator": ["measured_models/*.json", "py.typed"],
        "gangway.zoo": ["digits.npz", "py.typed"],
    },
    ext_modules=[compiled, native, probes],
    options={
        "build": {"build_base": scratch},
        "build_ext": {"parallel": 2},
        "egg_info": {} if os.access(ROOT, os.W_OK) else {"egg_base": scratch},
    },
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
)
