"""TVM's own search beside the templates, for the kernels that take longest, in a process of the compiler's."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from gangway.artifact.tuning import Search, TunedKernel, Tuning
from gangway.server.errors import CompileError

KERNELS: Final = 4
TRIALS: Final = 64


def compare_searches(path: Path, tuning: Tuning, progress: Callable[[str, float], None]) -> Tuning:
    """Return `tuning` with what MetaSchedule found for its longest convolutions. Raises CompileError, OSError."""
    kernels = longest(tuning)
    progress("MetaSchedule", 0.0)
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "gangway.compiler.tuning.compare", str(path), f"--trials={TRIALS}"]
    command += [f"--kernels={','.join(map(str, kernels))}", f"--answers-fd={write_fd}"]
    process = subprocess.Popen(
        command, pass_fds=(write_fd,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(write_fd)
    found = []
    try:
        with os.fdopen(read_fd) as answers:
            for line in answers:
                message = json.loads(line)
                if "error" in message:
                    raise CompileError(f"MetaSchedule: {message['error']}")
                found.append(Search(trials=TRIALS, **message))
                progress(f"MetaSchedule, {len(found)} of {len(kernels)}", len(found) / len(kernels))
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()
    return replace(tuning, searches=tuple(found))


def longest(tuning: Tuning) -> list[int]:
    """Return the numbers of the dense convolutions and products that take most of the model's time."""

    def time_us(kernel: TunedKernel) -> float:
        return kernel.uses * kernel.samples[0].latency_us

    numbers = [
        number
        for number, kernel in enumerate(tuning.kernels)
        if kernel.samples[0].candidate.description.startswith(("conv ", "winograd "))
    ]
    return sorted(numbers, key=lambda number: -time_us(tuning.kernels[number]))[:KERNELS]
