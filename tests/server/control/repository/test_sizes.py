"""Which sizes are compiled first, in which process, and what the cache keeps."""

import asyncio
import os
import signal
import time
from pathlib import Path

import onnx
import pytest

from gangway.artifact import trim as trimming
from gangway.artifact.cache import Cache
from gangway.artifact.reader import verify
from gangway.artifact.trim import UsedKeys, trim
from gangway.server.control.repository.compile_jobs import Compiler, CompileRequest
from gangway.server.control.repository.shapes import MAX_QUEUED, ShapeQueue
from gangway.server.control.supervisor.jobs import Jobs
from gangway.server.errors import CompileError
from gangway.server.messages import JobsUnderWay
from testing.processes import children_of, command_of

TEXT = "(float[n, w] x) => (float[n, w] y) { y = Add(x, x) }"
LONG_AGO_S = 1e6


def save(path: Path, width: int | str = "w") -> Path:
    text = TEXT.replace("w]", f"{width}]")
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}'), path)
    return path


def compilers() -> list[int]:
    """Those of this process; servers of other tests have some, too."""
    return [pid for pid in children_of(os.getpid()) if "gangway.compiler" in command_of(pid)]


async def reaped(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.01)


def test_models_take_turns_and_the_most_asked_size_goes_first() -> None:
    queue = ShapeQueue()
    for size in (1, 2, 3, 2):
        queue.ask(("a", 1), (size,))
    queue.ask(("b", 1), (9,))
    order = []
    while wanted := queue.next():
        order.append((wanted[0][0], *wanted[1]))
        queue.done(*wanted)
    assert order == [("a", 2), ("b", 9), ("a", 1), ("a", 3)]


def test_a_model_cannot_fill_the_queue() -> None:
    queue = ShapeQueue()
    for size in range(3 * MAX_QUEUED):
        queue.ask(("a", 1), (size,))
    queue.ask(("b", 1), (1,))
    order = []
    while wanted := queue.next():
        order.append(wanted[0][0])
        queue.done(*wanted)
    assert len(order) == MAX_QUEUED + 1 and order[1] == "b"


@pytest.mark.long
def test_sizes_share_a_process_whose_death_is_one_jobs_failure(tmp_path: Path) -> None:
    path, cache = save(tmp_path / "model.onnx"), tmp_path / "cache"
    cache.mkdir()

    async def check() -> None:
        compiler = Compiler(cache, idle_seconds=60.0)
        folders = [(await compiler.compile(CompileRequest("m", path, {"w": width}))).key for width in (3, 4)]
        (process,) = compilers()
        assert len(set(folders)) == 2
        os.kill(process, signal.SIGSTOP)
        job = asyncio.ensure_future(compiler.compile(CompileRequest("m", path, {"w": 5})))
        while not compiler.busy:
            await asyncio.sleep(0)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(CompileError, match="was killed by SIGKILL") as caught:
            await job
        assert not caught.value.is_final
        await compiler.compile(CompileRequest("m", path, {"w": 5}))
        assert compilers() != [process] and len(compilers()) == 1
        (process,) = compilers()
        compiler.stop()
        await reaped(process)

    asyncio.run(check())


def test_models_are_compiled_beside_each_other_until_requests_come(tmp_path: Path) -> None:
    """By as many processes as may run at once, which further models use, too."""
    paths, cache = [save(tmp_path / f"{width}.onnx", width) for width in range(1, 7)], tmp_path / "cache"
    cache.mkdir()

    async def compiled() -> None:
        told = list[JobsUnderWay]()
        compiler = Compiler(cache, idle_seconds=60.0, at_once=2, jobs=Jobs(told.append))
        await asyncio.gather(*(compiler.compile(CompileRequest("m", path)) for path in paths[:4]))
        beside = compilers()
        assert len(beside) == 2
        compiler.give_way()
        told.clear()
        await asyncio.gather(*(compiler.compile(CompileRequest("m", path)) for path in paths[4:]))
        assert {len(message.jobs) for message in told} == {0, 1}
        assert compilers() == beside
        compiler.stop()
        for process in beside:
            await reaped(process)

    asyncio.run(compiled())


def test_a_process_that_nobody_needs_ends(tmp_path: Path) -> None:
    path, cache = save(tmp_path / "model.onnx"), tmp_path / "cache"
    cache.mkdir()

    async def check() -> None:
        compiler = Compiler(cache, idle_seconds=0.01)
        await compiler.compile(CompileRequest("m", path, {"w": 3}))
        for process in compilers():
            await reaped(process)

    asyncio.run(check())


def test_the_cache_keeps_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, root = save(tmp_path / "model.onnx"), tmp_path / "cache"
    root.mkdir()
    (tmp_path / "cache" / "profiles").mkdir()

    async def keys() -> list[str]:
        compiler = Compiler(root, idle_seconds=60.0)
        keys = [(await compiler.compile(CompileRequest("m", path, {"w": width}))).key for width in (3, 4, 5)]
        (process,) = compilers()
        compiler.stop()
        await reaped(process)
        return keys

    used, old, recent = asyncio.run(keys())
    for number, key in enumerate((used, old)):
        os.utime(root / key / "manifest.json", (0, time.time() - LONG_AGO_S + number))
    others = UsedKeys(root)  # as another server does
    others.tell([used])
    assert trim(root, 1 << 40) < 1 << 40 and (root / old).exists()
    assert trim(root, 1) > 1
    assert (root / used).exists() and (root / recent).exists() and not (root / old).exists()
    assert all(verify(root / key).key == key for key in (used, recent))
    others.close()
    monkeypatch.setattr(trimming, "GRACE_SECONDS", -1.0)
    trim(root, 1)
    left = [item for item in root.rglob("*") if item.is_file() and item.suffix in (".bin", ".so", ".o", ".json")]
    assert [item.parent.name for item in left] in ([], ["weights"])
    assert (root / "profiles").exists() and Cache(root).lookup(used) is None
