"""Schedules of compound tasks that a search has found on one machine, and what it has measured so far, in the cache.

Both lie in `schedules/`: NAME.json and, while a search is unfinished, NAME.samples. NAME is a hash of the artifacts'
keys in order, and the machine's id.
"""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.artifact.profile import whole_machine_id
from gangway.base.files import write_whole
from gangway.base.json_codec import decode, encode
from gangway.scheduler.stages.ir import Pointers, Schedule, check_pointers, check_schedule

SCHEDULE_VERSION = 1
SCHEDULES_FOLDER = "schedules"
_KEY = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class ScheduleFileError(Exception):
    """The file does not hold a whole schedule of this format."""


@dataclass(frozen=True)
class StoredSchedule:
    """The fastest schedule of these artifacts, by stream. Times are medians in microseconds, measured by turns."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    layers: tuple[int, ...]
    machine: str  # id; all cores of the machine count
    cores: int  # that measured
    search: str  # "coordinate" or "random"
    pointers: Pointers
    stages: Schedule
    time_us: float
    sequential_us: float
    parallel_us: float
    schedules: int  # different ones that were measured
    seconds: float  # the search took, all together
    format_version: int = SCHEDULE_VERSION


@dataclass(frozen=True)
class PointerTime:
    """Pointers and the time of their schedule, in microseconds."""

    pointers: Pointers
    time_us: float


@dataclass(frozen=True)
class SearchState:
    """What a search has measured so far. It holds for the same artifacts and options only.

    `latency_us[stream][layer][version][cores - 1]`: as in `ModelProfile`.
    """

    keys: tuple[str, ...]
    options: str
    latency_us: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    samples: tuple[PointerTime, ...]
    seconds: float


def schedule_path(cache_dir: Path, keys: Sequence[str], machine: str) -> Path:
    """Where the schedule of these artifacts on a machine (by its id) lies."""
    import hashlib  # noqa: PLC0415 - 1.5 MB of OpenSSL, which the scheduler does without

    digest = hashlib.sha256(json.dumps(list(keys)).encode()).hexdigest()
    return cache_dir / SCHEDULES_FOLDER / f"{digest}-{machine}.json"


def state_path(cache_dir: Path, keys: Sequence[str], machine: str) -> Path:
    """Where a search keeps what it has measured."""
    return schedule_path(cache_dir, keys, machine).with_suffix(".samples")


def write_schedule(cache_dir: Path, found: StoredSchedule) -> Path:
    """Write it to its place, whole or not at all, over an older one; return the path. Raises OSError."""
    path = schedule_path(cache_dir, found.keys, found.machine)
    write_whole(path, encode(found, indent=1))
    return path


def read_schedule(path: Path) -> StoredSchedule:
    """Return the schedule in a file, checked for consistency. Raises FoundError that names file and field."""
    try:
        found = decode(StoredSchedule, path.read_bytes(), "schedule")
        _check(found)
    except (OSError, ValueError, RecursionError) as error:
        raise ScheduleFileError(f"{path}: {error}") from error
    return found


def find_schedule(cache_dir: Path, keys: Sequence[str], target: str) -> StoredSchedule | None:
    """Return the schedule of these artifacts on this machine, if there is one. A damaged file is logged and ignored."""
    path = schedule_path(cache_dir, keys, whole_machine_id(target))
    if not path.exists():
        return None
    try:
        found = read_schedule(path)
        if found.keys != tuple(keys):
            raise ScheduleFileError(f"{path}: it is of other artifacts")
    except ScheduleFileError as error:
        _log.warning("damaged schedule ignored: %s", error)
        return None
    return found


def write_state(path: Path, state: SearchState) -> None:
    """Write it, whole or not at all. Raises OSError."""
    write_whole(path, encode(state))


def read_state(path: Path, keys: Sequence[str], options: str, layers: Sequence[int], cores: int) -> SearchState | None:
    """Return what a search of these artifacts with these options has measured. A damaged file is logged and ignored."""
    try:
        state = decode(SearchState, path.read_bytes(), "samples")
        if (state.keys, state.options) != (tuple(keys), options):
            return None
        _require([len(stream) for stream in state.latency_us] == list(layers), "there are times of other layers")
        times_us = [times for stream in state.latency_us for layer in stream for times in layer]
        _require(all(stream and all(stream) for stream in state.latency_us), "a layer has no version")
        _require(all(len(times) == cores and min(times) >= 0 for times in times_us), "a layer's times are wrong")
        for sample in state.samples:
            check_pointers(sample.pointers, layers)
            _require(sample.time_us > 0, "a time is not above 0")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("damaged samples ignored: %s: %s", path, error)
        return None
    return state


def _check(found: StoredSchedule) -> None:
    _require(
        found.format_version == SCHEDULE_VERSION, f"format version {found.format_version} is not {SCHEDULE_VERSION}"
    )
    _require(bool(found.keys) and all(map(_KEY.fullmatch, found.keys)), "a key is not 64 hex digits")
    _require(len(found.keys) == len(found.names) == len(found.layers), "keys, names and layers are not of as many")
    _require(min(found.time_us, found.sequential_us, found.parallel_us) > 0, "a time is not above 0")
    check_pointers(found.pointers, found.layers)
    check_schedule(found.stages, found.layers, found.cores)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
