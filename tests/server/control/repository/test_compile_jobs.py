"""Compile jobs that a signal ends: onnxruntime serves the model, and the next server compiles it."""

import asyncio
import os
import signal
from pathlib import Path

import onnx
import pytest

from gangway.artifact.cache import Cache
from gangway.artifact.format import Engine
from gangway.compiler.key import model_key
from gangway.compiler.target import detect
from gangway.server.control.repository.compile_jobs import (
    LEAST_TIMEOUT_SECONDS,
    Compiler,
    CompileRequest,
    job_timeout_seconds,
)
from testing.processes import children_of, command_of
from tests.helpers.coming_and_going import coming_and_going

TEXT = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 6] x) => (float[n, 6] y) { y = Sigmoid(x) }'


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_job_that_a_signal_ends_leaves_its_model_to_onnxruntime(tmp_path: Path, number: signal.Signals) -> None:
    """Here it waits for the model's lock, so that it is there to be ended."""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT), path)
    cache = Cache(tmp_path / "cache")

    async def ended() -> tuple[Engine, str]:
        compiler = Compiler(cache.root)
        task = asyncio.create_task(compiler.compile(CompileRequest("model", path)))
        while not (jobs := [pid for pid in children_of(os.getpid()) if "gangway.compiler" in command_of(pid)]):
            await asyncio.sleep(0.01)
        os.kill(jobs[0], number)
        manifest = await task
        return manifest.engine, manifest.fallback_reason

    with cache.lock(model_key(path, detect())):
        engine, reason = asyncio.run(ended())
    assert engine is Engine.ONNXRUNTIME and number.name in reason
    assert cache.lookup(model_key(path, detect())) is None


def test_files_beside_a_model_may_come_and_go(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(bytes(100))
    with coming_and_going(tmp_path / "being written"):
        assert {job_timeout_seconds(tmp_path / "model.onnx") for _ in range(20_000)} == {LEAST_TIMEOUT_SECONDS}
