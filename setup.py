"""Build: the protocol files become modules, executor/native becomes an extension.

The extensions use Python's stable ABI, so one wheel serves every version from 3.11 on. A wheel is made in a temporary
folder: what an earlier build has left in the checkout gets into none, and the checkout may be read-only.
"""

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
C_FLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
PROTOS = Path("gangway", "protos")
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
        super().run()
        if not self.inplace:
            return
        for path in ROOT.glob("gangway/executor/_*.cpython-*.so"):  # which an import prefers
            path.unlink()


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

scratch = tempfile.mkdtemp()
atexit.register(shutil.rmtree, scratch, ignore_errors=True)

setup(
    packages=PACKAGES,
    include_package_data=False,  # C sources are of no use in a wheel
    package_data={
        **{package: ["*.pyi", "py.typed"] for package in PACKAGES[1:]},
        "gangway.protos": ["*.proto", "*.pyi", "py.typed"],
        "gangway.server.serving.http": ["*.html", "*.pyi", "py.typed"],
        "gangway.simulator": ["measured_models/*.json", "py.typed"],
        "gangway.zoo": ["digits.npz", "py.typed"],
    },
    ext_modules=[native, probes],
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        "build": {"build_base": scratch},
        "egg_info": {} if os.access(ROOT, os.W_OK) else {"egg_base": scratch},
    },
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
)
