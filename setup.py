"""Build: the protocol files become modules, executor/native becomes an extension."""

import re
import tempfile
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
C_FLAGS = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE"]
PACKAGES = [f"gangway.{name}" for name in find_packages("gangway")]


def generate_protos() -> None:
    """Write protos/*_pb2.py(i). `-I protos` names the files as Triton's clients do, so both load in one process."""
    from grpc_tools import protoc

    folder = ROOT / "protos"
    sources = sorted(folder.glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-I{folder}", f"--python_out={scratch}", f"--pyi_out={scratch}", *map(str, sources)]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed")
        for made in sorted(Path(scratch).glob("*_pb2.py*")):
            # protoc assumes the folder is on sys.path; ours are modules of a package.
            text = re.sub(r"^import (\w+_pb2)", r"from gangway.protos import \1", made.read_text(), flags=re.MULTILINE)
            target = folder / made.name
            if not target.exists() or target.read_text() != text:
                target.write_text(text)


class BuildPy(build_py):
    def run(self) -> None:
        generate_protos()
        super().run()


class BuildExt(build_ext):
    def run(self) -> None:
        generate_protos()
        super().run()


native = Extension(
    "gangway.executor._native",
    sources=sorted(glob("gangway/executor/native/*.c", root_dir=ROOT)),
    depends=sorted(glob("gangway/executor/native/*.h", root_dir=ROOT)),
    extra_compile_args=C_FLAGS,
)

probes = Extension(
    "gangway.executor._probes",
    sources=["gangway/executor/probes/probes.c"],
    extra_compile_args=[*C_FLAGS, "-ffp-contract=fast"],  # a multiplication and an addition become one instruction
)

setup(
    packages=PACKAGES,
    package_data={
        **{package: ["py.typed"] for package in PACKAGES},
        "gangway.protos": ["*.proto", "*.pyi", "py.typed"],
        "gangway.simulator": ["measured_models/*.json", "measured_models/batches/*.json", "py.typed"],
    },
    ext_modules=[native, probes],
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
)
