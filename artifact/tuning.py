"""The schema of a tuning: versions worth having on one machine (`docs/explanation/profiles-and-versions.md`).

A tuning lies in the cache beside the artifact of the static choices, whose key it carries. From both a second artifact
is made, with several versions of some layers and a key of its own.
"""

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from gangway.artifact.profile import InterferencePoint, whole_machine_id
from gangway.artifact.reader import MAX_VERSIONS
from gangway.base.files import write_whole
from gangway.base.json_codec import decode, encode

TUNING_VERSION = 3
TUNINGS_FOLDER = "tunings"
_KEY = re.compile(r"[0-9a-f]{64}")
_log = logging.getLogger(__name__)


class TuningError(Exception):
    """The file does not hold a whole tuning of this format."""


@dataclass(frozen=True)
class KnobCandidate:
    """A point of a template's knobs; by `knobs`, "bands=2 groups=1", the compiler finds it among those of a kernel."""

    knobs: str
    description: str
    tasks: int
    blocking_bytes: int
    parallelism: int


@dataclass(frozen=True)
class CandidateTime:
    """A candidate and its time: alone, one row, all cores; mean over the layers that use the kernel."""

    candidate: KnobCandidate
    latency_us: float


@dataclass(frozen=True)
class Finalist:
    """A sample, by its number, that was measured again. `latency_us`: as the sample's, but beside the other finalists.

    `disturbed_us[t][0]`: alone on `Tuning.interference_cores` cores, `disturbed_us[t][1 + p]`: on these beside
    `Tuning.interference[p]`; t counts independent tables of the same measurement. Empty where there was no other core.
    `gang_us[t][g]`: alone on `Tuning.gangs[g]` cores.
    """

    sample: int
    latency_us: float
    disturbed_us: tuple[tuple[float, ...], ...]
    gang_us: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class TunedKernel:
    """What was measured of one distinct kernel, and which samples became versions, the fastest alone first."""

    name: str  # shape, for people
    operator: str
    uses: int  # layers that it computes
    qos_us: float  # of one layer
    samples: tuple[CandidateTime, ...]  # the static choice first; empty if there is but that one
    finalists: tuple[Finalist, ...]
    versions: tuple[KnobCandidate, ...]


@dataclass(frozen=True)
class Tuning:
    """All kernels of a model. `layers[l]` is the number of the kernel that computes layer l."""

    key: str  # of the artifact of static choices
    model_name: str
    machine: str  # id; all cores of the machine count
    cores: int  # that measured
    gangs: tuple[int, ...]  # sizes on which finalists ran alone, all cores last
    interference_cores: int  # of these, the ones that computed while the others disturbed; 0: nothing was disturbed
    interference: tuple[InterferencePoint, ...]
    isolated_us: float  # the whole model, static choices, all cores
    qos_us: float
    trials: int  # samples of a kernel at most
    most_versions: int
    least_loss: float  # a version whose absence costs less was dropped
    kernels: tuple[TunedKernel, ...]
    layers: tuple[int, ...]
    seconds: float  # that it took, all together
    format_version: int = TUNING_VERSION

    @property
    def tuned_key(self) -> str:
        """The key of the artifact with these versions: it covers which they are, and not how fast they were."""
        knobs = [[version.knobs for version in kernel.versions] for kernel in self.kernels]
        return hashlib.sha256(json.dumps([self.key, knobs, self.layers]).encode()).hexdigest()


def tuning_path(cache_dir: Path, key: str, machine: str) -> Path:
    """Where the tuning of an artifact on a machine (by its id) lies."""
    return cache_dir / TUNINGS_FOLDER / f"{key}-{machine}.json"


def write_tuning(cache_dir: Path, tuning: Tuning) -> Path:
    """Write it to its place, whole or not at all, over an older one; return the path. Raises OSError."""
    path = tuning_path(cache_dir, tuning.key, tuning.machine)
    write_whole(path, encode_tuning(tuning))
    return path


def encode_tuning(tuning: Tuning) -> bytes:
    """Return the tuning as JSON text, UTF-8."""
    return encode(tuning, indent=1)


def read_tuning(path: Path) -> Tuning:
    """Return the tuning in a file, checked for consistency. Raises TuningError that names file and field."""
    try:
        tuning = decode(Tuning, path.read_bytes(), "tuning")
        _check(tuning)
    except (OSError, ValueError) as error:
        raise TuningError(f"{path}: {error}") from error
    return tuning


def find_tuning(cache_dir: Path, key: str, target: str) -> Tuning | None:
    """Return the tuning of an artifact on this machine, if there is one. A damaged file is logged and ignored."""
    path = tuning_path(cache_dir, key, whole_machine_id(target))
    if not path.exists():
        return None
    try:
        tuning = read_tuning(path)
        if tuning.key != key:
            raise TuningError(f"{path}: it is of another artifact, {tuning.key}")
    except TuningError as error:
        _log.warning("damaged tuning ignored: %s", error)
        return None
    return tuning


def find_tuning_by_result(cache_dir: Path, tuned_key: str, target: str) -> Tuning | None:
    """Return the tuning on this machine that the artifact `tuned_key` was made from, if it was made from one."""
    for path in (cache_dir / TUNINGS_FOLDER).glob(f"*-{whole_machine_id(target)}.json"):
        tuning = find_tuning(cache_dir, path.name.partition("-")[0], target)
        if tuning is not None and tuning.tuned_key == tuned_key:
            return tuning
    return None


def _check(tuning: Tuning) -> None:
    _require(tuning.format_version == TUNING_VERSION, f"format version {tuning.format_version} is not {TUNING_VERSION}")
    _require(_KEY.fullmatch(tuning.key) is not None, "the key is not 64 hex digits")
    _require(bool(tuning.layers), "there is no layer")
    _require(all(0 <= kernel < len(tuning.kernels) for kernel in tuning.layers), "a layer has no kernel")
    for kernel in tuning.kernels:
        _check_kernel(kernel, len(tuning.interference))


def _check_kernel(kernel: TunedKernel, levels: int) -> None:
    name = f"kernel '{kernel.name}'"
    _require(1 <= len(kernel.versions) <= MAX_VERSIONS, f"{name} has {len(kernel.versions)} versions")
    for finalist in kernel.finalists:
        _require(0 <= finalist.sample < len(kernel.samples), f"{name} has a finalist that is no sample")
        _require(all(len(row) == 1 + levels for row in finalist.disturbed_us), f"{name} has a wrong number of levels")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
