"""A worker process: `python -m gangway.executor.worker`, one per core, started by `executor/launch.py`.

It runs leases in C (native/worker.c) and comes back here only to load, unload or exit. It stays small: no numpy, unless
it is given a model that only onnxruntime can execute.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from gangway.executor import _native
from gangway.executor.complain import complain
from gangway.executor.control import ControlSegment
from gangway.executor.messages import Exit, Load, Ready, Unload, unpack
from gangway.executor.model_jobs import ModelJobs
from gangway.executor.process import be_ended_first, die_with_parent, keep_one_heap, take_precedence
from gangway.executor.region_channel import RegionChannel
from gangway.executor.region_jobs import RegionJobs
from gangway.executor.segment import Segment


def main() -> None:
    """Serve the rings of one worker until Exit."""
    options = _options()
    _settle(options.core, options.parent)
    control = ControlSegment.attach(options.control_fd)
    control.command_rings[options.rank].discard()  # meant for a predecessor
    worker = _make_worker(control, options)
    regions = None
    if options.regions_fd >= 0:
        regions = RegionJobs(worker, RegionChannel(socket.socket(fileno=options.regions_fd)))
        regions.start()
    worker.send(Ready(os.getpid()).pack())
    jobs = ModelJobs(worker, options.cache_dir)
    while _obey(worker, jobs, regions):
        pass
    if jobs.pending or regions is not None:
        os._exit(0)  # their threads must not be found in the middle of something when the interpreter goes


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True, help="number of this worker")
    parser.add_argument("--core", type=int, required=True, help="core to be pinned to")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--arena-fd", type=int, required=True)
    parser.add_argument("--io-fds", type=lambda text: [int(fd) for fd in text.split(",")], required=True)
    parser.add_argument("--cache-dir", type=Path, required=True, help="folder of artifacts, one folder per key")
    parser.add_argument("--regions-fd", type=int, default=-1, help="socket for orders about regions; -1: none come")
    parser.add_argument("--spin-us", type=int, default=20)
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    return parser.parse_args()


def _settle(core: int, parent: int) -> None:
    """Pin to the core, tie this life to the parent's and to nothing else; then whatever holds for the whole process."""
    die_with_parent()
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    os.sched_setaffinity(0, {core})
    take_precedence()
    be_ended_first()
    keep_one_heap()


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
        lost_regions=layout.lost_regions,
    )


def _obey(worker: _native.Worker, jobs: ModelJobs, regions: RegionJobs | None) -> bool:
    """Run leases until there is another command, and do it; False after Exit."""
    command = worker.loop(jobs.pending > 0)
    if command is None:
        jobs.answer()
        if regions is not None:
            regions.answer()
        return True
    match unpack(command):
        case Load() | Unload() as job:
            jobs.give(job)
        case Exit():
            return False
        case unexpected:
            complain(f"ignored {unexpected}")
    return True


if __name__ == "__main__":
    main()
