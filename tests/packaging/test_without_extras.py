"""Without TVM, onnx, onnxruntime and grpcio a server serves what is in the cache, and names the extra for the rest."""

import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from gangway.artifact.cache import Cache
from gangway.clients.connection import ServerConnection
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.zoo import write_model
from tests.packaging.check_wheel import COMPILED, NUMBERS, STRINGS, add, failure, refusal, run, server

MISSING = ("apache_tvm", "grpc", "matplotlib", "onnx", "tvm")  # what the names of folders begin with


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of this one, but for those of extras."""
    environment = tmp_path_factory.mktemp("core") / "environment"
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    for folder in (path for path in sys.path if Path(path).name == "site-packages"):
        for path in Path(folder).iterdir():
            target = packages / path.name
            is_wanted = path.suffix != ".pth" or path.name.startswith("__editable__")  # others name further folders
            if is_wanted and not path.name.startswith(MISSING) and not target.exists():
                target.symlink_to(path)
    command = environment / "bin" / "gangway"
    command.write_text(
        f"#!{environment / 'bin/python'}\nimport sys\nfrom gangway.server.cli import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    return environment


@pytest.fixture(scope="module")
def folder(compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository and a cache: one model is there compiled, one left to onnxruntime, one is not there."""
    folder = tmp_path_factory.mktemp("warm")
    for name in (COMPILED, "mlp"):
        shutil.copytree(compiled_zoo.repository / name, folder / "models" / name)
    write_model(folder / "models", STRINGS)
    cache = folder / "cache"
    cache.mkdir(mode=0o755)
    (cache / compiled_zoo.artifact(COMPILED).name).symlink_to(compiled_zoo.artifact(COMPILED))
    path = folder / "models" / STRINGS / "1" / "model.onnx"
    compile_model(path, STRINGS, Cache(cache), detect(), lambda phase, done, total: None)
    return folder


@pytest.mark.long
def test_the_cache_is_served(core: Path, folder: Path) -> None:
    with server(core, folder) as port:
        assert add(port, COMPILED, NUMBERS) == [number + 1 for number in NUMBERS]
        assert "pip install 'gangway-serve[onnxruntime]'" in refusal(port, STRINGS)
        assert "not in the cache, and compiling needs tvm, onnx, onnxruntime: pip install 'gangway-serve[compile]'" in (
            refusal(port, "mlp")
        )


def test_grpc_is_served_without_grpcio(core: Path, folder: Path) -> None:
    with server(core, folder) as port:
        (grpc_port,) = re.findall(r"ready: gRPC on \S+:(\d+)", (folder / "server.log").read_text())
        with ServerConnection(f"127.0.0.1:{grpc_port}", 20) as client:
            assert client.model_metadata(COMPILED).name == COMPILED
        run(core, "top", f"127.0.0.1:{port}", "--once")
        assert "gangway client: needs grpc: pip install 'gangway-serve[client]'" in failure(core, "client", COMPILED)


def test_a_repository_is_checked_without_grpcio(core: Path, folder: Path, tmp_path: Path) -> None:
    (tmp_path / COMPILED).symlink_to(folder / "models" / COMPILED)
    run(core, "check", tmp_path, f"--cache-dir={folder / 'cache'}")


@pytest.mark.long
def test_commands_say_what_they_need(core: Path, folder: Path, tmp_path: Path) -> None:
    compiled, cache = folder / "models" / COMPILED, folder / "cache"
    assert "gangway zoo: needs onnx: pip install 'gangway-serve[compile]'" in failure(core, "zoo", tmp_path / "zoo")
    assert "gangway-serve[compile]" in failure(core, "compile", f"--cache-dir={cache}", compiled.with_name("mlp"))
    assert "gangway-serve[compile]" in failure(core, "tune", f"--cache-dir={cache}", compiled)
    load = ["--mix=light", "--rate=50", "--queries=20", "--policy=model_fcfs"]
    command = [core / "bin/gangway", "simulate", *load, "--output", tmp_path / "simulated"]
    tables = subprocess.run(command, check=True, text=True, capture_output=True).stdout
    assert "modelled" in tables and "no picture: it needs matplotlib" in tables and "gangway-serve[report]" in tables
