"""A worker process: `python -m gangway.executor.worker`, one per core, started by `executor/launch.py`.

It runs leases in C (native/worker.c) and comes back here only to load, unload or exit. It stays small: no numpy, unless
it is given a model that only onnxruntime can execute.
"""

import argparse
import os
import sys
from pathlib import Path

from gangway.artifact.reader import ArtifactError
from gangway.executor import _native
from gangway.executor.control import ControlSegment
from gangway.executor.messages import Exit, Load, Loaded, Ready, Unload, Unloaded, unpack
from gangway.executor.process import die_with_parent, take_precedence
from gangway.executor.program import load_program
from gangway.executor.segment import Segment


def main() -> None:
    """Serve the rings of one worker until Exit."""
    options = _options()
    _settle(options.core, options.parent)
    control = ControlSegment.attach(options.control_fd)
    control.command_rings[options.rank].discard()  # meant for a predecessor
    worker = _make_worker(control, options)
    worker.send(Ready(os.getpid()).pack())
    while _obey(worker, options.cache_dir):
        pass


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True, help="number of this worker")
    parser.add_argument("--core", type=int, required=True, help="core to be pinned to")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    parser.add_argument("--io-fds", type=lambda text: [int(fd) for fd in text.split(",")], required=True)
    parser.add_argument("--cache-dir", type=Path, required=True, help="folder of artifacts, one folder per key")
    parser.add_argument("--spin-us", type=int, default=20)
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    return parser.parse_args()


def _settle(core: int, parent: int) -> None:
    """Pin to the core, and tie this life to the parent's and to nothing else."""
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.sched_setaffinity(0, {core})
    take_precedence()


def _make_worker(control: ControlSegment, options: argparse.Namespace) -> _native.Worker:
    layout = control.layout
    return _native.Worker(
        control=control.segment.view,
        bell=layout.worker(options.rank),
        status=layout.worker_status(options.rank),
        commands=layout.command_ring(options.rank),
        completions=layout.completion_ring(options.rank),
        scheduler_bell=layout.scheduler_bell,
        leases=layout.lease_table,
        lease_count=layout.leases,
        arena=Segment.attach(options.arena_fd).view,
        io=[Segment.attach(fd).view for fd in options.io_fds],
        spin_us=options.spin_us,
    )


def _obey(worker: _native.Worker, cache_dir: Path) -> bool:
    """Run leases until there is another command, and do it; False after Exit."""
    match unpack(worker.loop()):
        case Load(model_id, key):
            worker.send(_load(worker, model_id, cache_dir / key).pack())
        case Unload(model_id):
            worker.set_program(model_id, None)
            worker.send(Unloaded(model_id).pack())
        case Exit():
            return False
        case unexpected:
            print(f"worker: ignored {unexpected}", file=sys.stderr)
    return True


def _load(worker: _native.Worker, model_id: int, folder: Path) -> Loaded:
    try:
        worker.set_program(model_id, load_program(folder))
    except (ArtifactError, OSError, ValueError) as error:
        print(f"worker: cannot load {folder}: {error}", file=sys.stderr, flush=True)
        return Loaded(model_id, False, str(error).replace(f"{folder}/", ""))
    return Loaded(model_id, True)


if __name__ == "__main__":
    main()
