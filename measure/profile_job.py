"""`python -m gangway.measure.profile_job`: measures one compiled model while nobody needs the cores.

It runs with the scheduling class of idle processes, and so do its workers: whatever a server has to do goes first.
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from gangway.artifact.profile import write_profile
from gangway.artifact.reader import read_manifest
from gangway.executor.process import die_with_parent
from gangway.measure.profiler import profile_model


def main() -> int:
    """Write the profile into the cache; 0 if that went well."""
    parser = argparse.ArgumentParser(prog="gangway.measure.profile_job", description=__doc__)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--key", required=True, help="of the artifact")
    parser.add_argument("--cores", type=lambda text: [int(core) for core in text.split(",")], required=True)
    parser.add_argument("--seconds", type=float, required=True, help="time to take")
    parser.add_argument("--parent", type=int, required=True, help="process to die with")
    options = parser.parse_args()
    die_with_parent()
    if os.getppid() != options.parent:  # it died before the line above
        return 1
    os.nice(19)
    with suppress(OSError):  # some containers forbid it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    manifest = read_manifest(options.cache_dir / options.key)
    write_profile(options.cache_dir, profile_model(options.cache_dir, manifest, options.cores, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
