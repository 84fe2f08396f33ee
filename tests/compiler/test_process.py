"""`python -m gangway.compiler` and `gangway compile` as processes."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest

from gangway.artifact.reader import read_manifest
from gangway.compiler.command import main as compile_command
from gangway.compiler.progress import PHASES
from gangway.zoo import write_model

TIMEOUT_S = 60
OPEN = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 3, H, 4] x) => (float[n, 3, H, 4] y) { y = Relu(x) }'


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    return write_model(tmp_path / "repository", "mlp") / "1" / "model.onnx"


def start(arguments: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gangway.compiler", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_open_sizes_are_found_without_tvm(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(OPEN), path)
    code = "import sys; from gangway.compiler.__main__ import main; status = main(sys.argv[1:])"
    code += "; sys.exit(status or any(name.partition('.')[0] == 'tvm' for name in sys.modules))"
    command = [sys.executable, "-c", code, str(path), f"--cache-dir={tmp_path / 'cache'}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(Path(lines(done.stdout)[-1]["folder"]))
    assert manifest.fallback_reason.startswith("input 'x': dimension 2 is dynamic, 'H'")


@dataclass(frozen=True)
class Compiled:
    """A model that a process has compiled, and what that said of its progress."""

    path: Path
    cache: Path
    phases: list[dict[str, Any]]
    result: dict[str, Any]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("compiled")
    path, cache = write_model(folder / "repository", "mlp") / "1" / "model.onnx", folder / "cache"
    receive, send = os.pipe()
    with start([path, "--cache-dir", cache, "--progress-fd", str(send)], pass_fds=[send]) as process:
        os.close(send)
        with os.fdopen(receive) as pipe:
            *phases, result = lines(pipe.read())
        assert process.wait(TIMEOUT_S) == 0
    return Compiled(path, cache, phases, result)


def test_progress_and_result(compiled: Compiled) -> None:
    assert tuple(dict.fromkeys(line["phase"] for line in compiled.phases)) == PHASES
    assert all(0 <= line["done"] <= line["total"] for line in compiled.phases)
    result = compiled.result
    assert result["cached"] is False
    assert Path(result["folder"]) == (compiled.cache / result["key"]).resolve()
    manifest = json.loads((Path(result["folder"]) / "manifest.json").read_text())
    assert manifest["model_name"] == "mlp"


def test_two_at_once_compile_once(mlp: Path, tmp_path: Path) -> None:
    processes = [start([mlp, "--cache-dir", tmp_path / "cache", "--json"]) for _ in range(2)]
    results = [lines(process.communicate(timeout=TIMEOUT_S)[0])[-1] for process in processes]
    assert sorted(result["cached"] for result in results) == [False, True]
    assert len({result["folder"] for result in results}) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(
        [results[0]["key"], "kernels", "locks"]
    )


def test_cached_model_needs_no_tvm(compiled: Compiled, tmp_path: Path) -> None:
    (tmp_path / "poison" / "tvm").mkdir(parents=True)
    (tmp_path / "poison" / "tvm" / "__init__.py").write_text("raise SystemExit('TVM was imported')")
    arguments = [compiled.path, "--cache-dir", compiled.cache, "--json"]
    with start(arguments, env={**os.environ, "PYTHONPATH": str(tmp_path / "poison")}) as second:
        output, errors = second.communicate(timeout=TIMEOUT_S)
    assert second.returncode == 0, errors
    assert lines(output)[-1]["cached"] is True


def test_several_are_looked_up_and_none_is_compiled(compiled: Compiled, tmp_path: Path) -> None:
    other = write_model(tmp_path / "repository", "simple") / "1" / "model.onnx"
    models = [other, tmp_path / "absent.onnx", compiled.path]
    with start(["--serve=compile", "--cache-dir", compiled.cache, "--json"], stdin=subprocess.PIPE) as second:
        output, errors = second.communicate(json.dumps({"look_up": list(map(str, models))}), timeout=TIMEOUT_S)
    assert second.returncode == 0, errors
    found = {"found": str(compiled.path), "folder": compiled.result["folder"]}
    assert lines(output) == [found, {"absent": 1}]
    kept = [compiled.result["key"], "kernels", "locks"]
    assert sorted(path.name for path in compiled.cache.iterdir()) == sorted(kept)


@pytest.mark.parametrize(
    ("content", "target", "code", "kind"),
    [(b"rubbish", None, 3, "model"), (None, "quantum", 4, "unsupported")],
)
def test_failures_have_codes(
    mlp: Path, tmp_path: Path, content: bytes | None, target: str | None, code: int, kind: str
) -> None:
    if content is not None:
        mlp.write_bytes(content)
    arguments = [mlp, "--cache-dir", tmp_path / "cache", "--json", *(["--target", target] if target else [])]
    with start(arguments) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code
    assert lines(output)[-1]["kind"] == kind
    assert lines(output)[-1]["error"] in errors


def test_unwritable_cache_is_an_io_error(mlp: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with start([mlp, "--cache-dir", tmp_path / "cache", "--json"]) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 5
    assert lines(output)[-1]["kind"] == "io"


def test_killed_compiler_leaves_nothing_that_the_next_one_keeps(mlp: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    receive, send = os.pipe()
    with start([mlp, "--cache-dir", cache, "--progress-fd", str(send)], pass_fds=[send]) as process:
        os.close(send)
        with os.fdopen(receive) as pipe:
            next(line for line in pipe if '"kernels"' in line)
            process.kill()
    assert any(path.name.startswith(".") for path in cache.iterdir())
    assert compile_command([str(mlp), "--cache-dir", str(cache)]) == 0
    assert not any(path.name.startswith(".") for path in cache.iterdir())


def test_command_prints_layers_phases_and_cache(mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(mlp.parents[1]), "--cache-dir", str(tmp_path / "cache")]
    assert compile_command(arguments) == 0
    text = capsys.readouterr().out
    for word in ("Gemm+Relu", "16 -> 64", "MFLOP", "tasks", "kernels", "compiled in"):
        assert word in text
    assert compile_command(arguments) == 0
    assert "found in the cache" in capsys.readouterr().out


def test_command_explains_what_it_cannot_do(mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    mlp.write_bytes(b"\x08")
    for path, word in ((tmp_path / "none", "does not exist"), (tmp_path / "empty", "no version"), (mlp, "ONNX")):
        assert compile_command([str(path), "--cache-dir", str(tmp_path / "cache")]) == 1
        assert word in capsys.readouterr().err
