"""The compiler that makes artifacts of samples: `python -m gangway.compiler.tuning`, told what to make."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gangway.artifact.tuning import Candidate
from gangway.server.errors import CompileError


@dataclass(frozen=True)
class Kernel:
    """A distinct kernel of the model and what may compute it, the static choice first."""

    name: str
    operator: str
    uses: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Space:
    """All kernels; `key` is that of the artifact of static choices, `layers[l]` the number of layer l's kernel."""

    key: str
    kernels: tuple[Kernel, ...]
    layers: tuple[int, ...]


class TuningCompiler:
    """A process that compiles, one order after the other. A context manager; the process ends with it."""

    def __init__(
        self, path: Path, cache_dir: Path, scratch: Path, trials: int, progress: Callable[[int, int], None]
    ) -> None:
        self._progress = progress
        read_fd, write_fd = os.pipe()
        command = [sys.executable, "-m", "gangway.compiler.tuning", str(path), f"--cache-dir={cache_dir}"]
        command += [f"--scratch={scratch}", f"--trials={trials}", f"--answers-fd={write_fd}"]
        self._process = subprocess.Popen(command, pass_fds=(write_fd,), stdin=subprocess.PIPE, text=True)
        os.close(write_fd)
        self._answers = os.fdopen(read_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._process.terminate()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()

    def space(self) -> Space:
        """Return what can be tried; the artifact of static choices is in the cache then. Raises CompileError."""
        found = self._answer("kernels")
        kernels = [
            Kernel(one["name"], one["operator"], one["uses"], tuple(Candidate(**item) for item in one["candidates"]))
            for one in found["kernels"]
        ]
        return Space(found["key"], tuple(kernels), tuple(found["layers"]))

    def make(self, folder: Path, versions: Sequence[Sequence[int]]) -> None:
        """Make the artifact `folder`: `versions[k]` are the numbers of kernel k's candidates. Raises CompileError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"folder": str(folder), "versions": versions}) + "\n")
        self._process.stdin.flush()
        self._answer("folder")

    def _answer(self, field: str) -> dict[str, Any]:
        for line in self._answers:
            message: dict[str, Any] = json.loads(line)
            if field in message:
                return message
            if "error" in message:
                raise CompileError(message["error"])
            if "done" in message:
                self._progress(message["done"], message["total"])
        raise CompileError("the compiler's process ended")
