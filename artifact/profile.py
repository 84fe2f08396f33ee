"""The schema of a profile: how fast a compiled model is on one machine (`docs/explanation/profiles-and-versions.md`).

A profile lies in the cache beside the artifact, not inside it: an artifact never changes, and machines that share a
cache measure each their own.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gangway.base.files import write_whole
from gangway.base.host_limits import cpu_name
from gangway.base.json_codec import decode, encode

PROFILE_VERSION = 6
_OLDER = (4, 5)  # versions without `agreeing`; the first has one field more, `counters`
PROFILES_FOLDER = "profiles"
LEAST_RUNS = 3  # `Profile.runs`: of fewer any may be an outlier, and the error is unknown
# `Profile.cores_whole`: the policy's `busy_efficiency`. Below it no model gets all cores, however well it scales.
LEAST_WHOLE = 0.8
ALIKE = 0.9  # two measurements agree if the smaller `cores_whole` is so much of the larger one
LEAST_AGREEING = 3  # `Profile.agreeing`: then it is the machine that is so, and not what else ran
MOST_NAMES = 64  # of one profile, the newest ones
_NAMES_SUFFIX = ".names"  # of the file beside a profile
_HEX = re.compile(r"[0-9a-f]+")


class ProfileError(Exception):
    """The file does not hold a whole profile of this format."""


@dataclass(frozen=True)
class ProfiledMachine:
    """Where a profile was measured. Peak and bandwidth are those of one core while the others are idle."""

    machine_id: str
    cpu: str  # as /proc/cpuinfo names it
    cores: int
    target: str  # of the artifact: "avx512", "avx2" or "baseline"
    peak_flops_per_us: float
    bandwidth_bytes_per_us: float


@dataclass(frozen=True)
class InterferencePoint:
    """Generated load on the other cores. `level`: by how much it slows the reference down (1.0: twice the time)."""

    kind: str  # "stream" or "thrash"
    share: int  # percent of the time that the load works
    level: float


@dataclass(frozen=True)
class LayerProfile:
    """One layer. `latency_us[version][i][j]`: median, isolated, on `Profile.cores[i]` cores, `Profile.batches[j]` rows.

    `memory_us`, `compute_us`: Layerweaver+'s m and c of one row on one core: what bytes and operations would take at
    the machine's measured bandwidth and peak. `slope[version]`: relative slowdown per unit of interference level, and
    `slowdown[version][p]`: relative slowdown beside `Profile.interference[p]`; both empty where there was no other
    core.
    """

    name: str
    latency_us: tuple[tuple[tuple[float, ...], ...], ...]
    memory_us: float
    compute_us: float
    slope: tuple[float, ...]
    slowdown: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Profile:
    """One compiled model on one machine.

    `isolated_us[i][j]`: the whole model, default version of each layer, `cores[i]` cores, `batches[j]` rows.
    `together_us[i][j]`: the same while other gangs of `cores[i]` do it, too: as many as the machine has cores for.
    """

    key: str  # the artifact's
    model_name: str
    machine: ProfiledMachine
    cores: tuple[int, ...]  # numbers of cores, ascending from 1
    batches: tuple[int, ...]  # numbers of rows, ascending from 1
    layers: tuple[LayerProfile, ...]
    isolated_us: tuple[tuple[float, ...], ...]
    together_us: tuple[tuple[float, ...], ...]  # of the slowest gang
    interference: tuple[InterferencePoint, ...]  # empty where there was no other core
    interference_cores: int  # cores of the model while it was disturbed; 0: it was not
    runs: tuple[int, ...]  # by batch: the fewest behind any of its times
    scatter: float  # of one run about the median of its setting, as a share of it: a standard deviation
    seconds: float  # the measurement took
    # Speed of the slowest core while all worked, of one alone: before or after, the worse. At most the share of the
    # cores that other processes left meanwhile.
    cores_whole: float = 1.0
    agreeing: int = 0  # measurements alike in `cores_whole`, of those beside which other processes were idle
    format_version: int = PROFILE_VERSION

    @property
    def whole(self) -> bool:
        """Whether the cores were there all at once; if not, times on several cores are likely to be too long."""
        return self.cores_whole >= LEAST_WHOLE

    @property
    def doubtful(self) -> bool:
        """Whether the cores were not whole, and too few measurements agree for that to be the machine's nature."""
        return not self.whole and self.agreeing < LEAST_AGREEING


def better_of(former: Profile, newer: Profile) -> Profile:
    """Return which of two measurements of a model to keep: the one whose cores were more whole, or newer if whole.

    If they agree, it counts those that agreed with either.
    """
    shares = former.cores_whole, newer.cores_whole
    best = newer if newer.whole or newer.cores_whole >= former.cores_whole else former
    alike = min(shares) >= ALIKE * max(shares)
    return replace(best, agreeing=former.agreeing + newer.agreeing) if alike else best


def profile_path(cache_dir: Path, key: str, machine: str) -> Path:
    """Where the profile of an artifact on a machine (by its id) lies."""
    return cache_dir / PROFILES_FOLDER / f"{key}-{machine}.json"


def write_profile(cache_dir: Path, profile: Profile) -> Path:
    """Write it to its place, whole or not at all, over an older one; return the path. Raises OSError."""
    path = profile_path(cache_dir, profile.key, profile.machine.machine_id)
    write_whole(path, encode_profile(profile))
    return path


def keep_better(cache_dir: Path, measured: Profile) -> Profile:
    """Write the better of a measurement and the profile that is there, if any; return it. Raises OSError."""
    try:
        former = read_profile(profile_path(cache_dir, measured.key, measured.machine.machine_id))
    except ProfileError:
        kept = measured
    else:
        kept = better_of(former, measured)
    write_profile(cache_dir, kept)
    return kept


def note_name(path: Path, name: str) -> None:
    """Note beside a profile that a server has loaded its artifact under another name. Raises OSError."""
    noted = other_names(path)
    if name not in noted:
        lines = [json.dumps(each) + "\n" for each in (*noted, name)[-MOST_NAMES:]]
        write_whole(path.with_suffix(_NAMES_SUFFIX), "".join(lines).encode())


def other_names(path: Path) -> tuple[str, ...]:
    """Return the names under which servers have loaded a profile's artifact, beside the profile's own."""
    try:
        lines = path.with_suffix(_NAMES_SUFFIX).read_bytes().splitlines()
        return tuple(str(json.loads(line)) for line in lines)
    except (OSError, ValueError, RecursionError):
        return ()


def encode_profile(profile: Profile) -> bytes:
    """Return the profile as JSON text, UTF-8."""
    return encode(profile, indent=1)


def read_profile(path: Path) -> Profile:
    """Return the profile in a file of this format or of versions 4 and 5, checked for consistency.

    Raises ProfileError that names file and field.
    """
    try:
        profile = decode(Profile, _present_format(path.read_bytes()), "profile")
        _check(profile)
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: {error}") from error
    return profile


def whole_machine_id(target: str) -> str:
    """Return the id of this machine with all its cores, whichever of them this process may use."""
    return machine_id(cpu_name(), os.cpu_count() or 1, target)


def machine_id(cpu: str, cores: int, target: str) -> str:
    """Return the id under which measurements of a machine lie in the cache: 12 hex digits of a SHA-256."""
    import hashlib  # noqa: PLC0415 - 1.5 MB of OpenSSL, which the scheduler does without

    return hashlib.sha256(json.dumps([cpu, cores, target]).encode()).hexdigest()[:12]


def _present_format(text: bytes) -> bytes:
    """Return the file's text as it would be in this version, if it is of an older one that can be read."""
    record = json.loads(text)
    if not isinstance(record, dict) or (version := record.get("format_version")) not in _OLDER:
        return text
    if version == _OLDER[0]:
        record.pop("counters", None)
    return json.dumps({"agreeing": 0, **record, "format_version": PROFILE_VERSION}).encode()


def _check(profile: Profile) -> None:
    if profile.format_version != PROFILE_VERSION:
        raise ValueError(f"format version {profile.format_version} instead of {PROFILE_VERSION}")
    _require(_HEX.fullmatch(profile.key) is not None and len(profile.key) == 64, "the key is not 64 hex digits")
    _require(_HEX.fullmatch(profile.machine.machine_id) is not None, "the machine id is not hexadecimal")
    _require(profile.machine.peak_flops_per_us > 0 and profile.machine.bandwidth_bytes_per_us > 0, "a speed is not > 0")
    for name, counts in (("cores", profile.cores), ("batches", profile.batches)):
        _require(counts[:1] == (1,) and list(counts) == sorted(set(counts)), f"{name} do not ascend from 1")
    _require(bool(profile.layers), "there is no layer")
    _require(len(profile.runs) == len(profile.batches) and min(profile.runs) >= 1, "runs are not one or more a batch")
    _require(profile.scatter >= 0, "scatter is negative")
    _require(0 < profile.cores_whole <= 1, "cores_whole is not a share")
    _require(profile.agreeing >= 0, "agreeing is negative")
    _check_grid("isolated_us", profile.isolated_us, profile)
    _check_grid("together_us", profile.together_us, profile)
    for layer in profile.layers:
        _check_layer(layer, profile)


def _check_layer(layer: LayerProfile, profile: Profile) -> None:
    versions = len(layer.latency_us)
    _require(versions >= 1, f"layer '{layer.name}' has no version")
    for grid in layer.latency_us:
        _check_grid(f"latency_us of layer '{layer.name}'", grid, profile)
    _require(min(layer.memory_us, layer.compute_us) >= 0, f"layer '{layer.name}' has a negative time")
    disturbed = versions if profile.interference else 0
    _require(len(layer.slope) == len(layer.slowdown) == disturbed, f"layer '{layer.name}' has a slope too many or few")
    for row in layer.slowdown:
        _require(len(row) == len(profile.interference), f"layer '{layer.name}' has a slowdown too many or few")


def _check_grid(name: str, grid: Sequence[Sequence[float]], profile: Profile) -> None:
    shape = [len(profile.batches)] * len(profile.cores)
    _require([len(row) for row in grid] == shape, f"{name} is not {len(shape)} cores x {len(profile.batches)} batches")
    _require(all(time_us >= 0 for row in grid for time_us in row), f"{name} has a negative time")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
