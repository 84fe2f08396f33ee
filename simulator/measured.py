"""Measured models in small files: every version for one row, the first one for batches, too.

The simulator's own models lie in the repository, some 10 to 40 KB each. `python -m gangway.simulator.measured PROFILE
...` writes them. Each PROFILE is a file that `gangway profile --json` wrote, one a session; the artifact that was
measured lies in the cache.

Of several sessions of one artifact each time is the smallest: each is a median, and what else the machine did only adds
to it. `spread` says how well the quietest sessions agree. Slopes are of the session with the strongest interference, of
those whose levels rise with the load. Where they do not rise, the load of something else was measured.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gangway.artifact.cache import add_cache_dir
from gangway.artifact.format import Manifest
from gangway.artifact.precision import FP32
from gangway.artifact.profile import (
    LEAST_WHOLE,
    PROFILES_FOLDER,
    Profile,
    ProfileError,
    other_names,
    read_profile,
)
from gangway.artifact.reader import ArtifactError, read_manifest
from gangway.base.files import write_whole
from gangway.base.json_codec import decode
from gangway.scheduler.profiles import doubt
from gangway.simulator.kernel_generation import FOLDER, GENERATION_FILE, GenerationError, current_generation

FORMAT_VERSION = 4
UNKNOWN_GENERATION = 0  # of kernels: the model was not measured for the repository
COMPARED_SESSIONS = 2  # the quietest ones: `spread` is of them, since noise only adds
MAX_SPREAD = 0.03  # beyond it the times are doubtful

MAX_LEVEL = 1.5  # two cores that share one core's bandwidth make 1; beyond that other programs ran, too
Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class MeasuredModel:
    """One model. `latency_us[layer][version][i]`: isolated, one row, on `cores[i]` cores, in microseconds.

    `slope[layer][version]`, `memory_us[layer]`, `compute_us[layer]`: as in the profile
    (`docs/explanation/profiles-and-versions.md`).
    `tasks[layer][version]`: into how many pieces a gang can share the layer's row. `kernel_rows[layer]`,
    `kernel_tasks[layer]`: version 0's kernel for batches, rows of one call and pieces of it; 0: there is none.
    `batch_us[layer][i][j]`: isolated, version 0, on `cores[i]` cores, `batches[j]` rows. `isolated_us[i][j]` and
    `together_us[i][j]`: the whole model, alone and beside others like it, as in the profile.

    `spread`: by what share the second shortest session takes longer than the shortest one, the whole model, one row, on
    the number of cores where that is most. Of fewer sessions, what two of them may differ by: see `session_spread`.
    `cores_whole`: as in the profile, of the best session. `row_bytes`: of all inputs and outputs.
    `kernel_generation`: see `kernel_generation.py`.
    """

    model_name: str
    cpu: str
    target: str
    cores: tuple[int, ...]  # ascending from 1
    latency_us: tuple[tuple[tuple[float, ...], ...], ...]
    slope: tuple[tuple[float, ...], ...]
    tasks: tuple[tuple[int, ...], ...]
    memory_us: tuple[float, ...]
    compute_us: tuple[float, ...]
    batches: tuple[int, ...]  # ascending from 1
    batch_us: tuple[tuple[tuple[float, ...], ...], ...]
    isolated_us: tuple[tuple[float, ...], ...]
    together_us: tuple[tuple[float, ...], ...]
    kernel_rows: tuple[int, ...]
    kernel_tasks: tuple[int, ...]
    sessions: int = 1
    spread: float = 0.0
    cores_whole: float = 1.0
    row_bytes: int = 0
    kernel_generation: int = UNKNOWN_GENERATION
    format_version: int = FORMAT_VERSION

    @property
    def doubts(self) -> tuple[str, ...]:
        """Return why results that rest on these times may be wrong, in words; nothing: no reason is known."""
        found = []
        if self.cores_whole < LEAST_WHOLE:
            found.append(f"cores slowed each other down to {self.cores_whole:.0%} of their speed while it was measured")
        if self.spread > MAX_SPREAD:
            found.append(f"its times spread by {self.spread:.1%} over {self.sessions} session(s)")
        return tuple(found)


def read_measured(path: Path) -> MeasuredModel:
    """Read such a file, or a profile whose artifact lies in the same cache. Raises ProfileError that names the file."""
    try:
        content = json.loads(path.read_bytes())
        is_profile = "machine" in content
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ProfileError(f"{path}: {error}") from error
    if is_profile:
        profile, manifest = _profiled(path)
        return measured_model([profile], manifest)
    try:
        model = decode(MeasuredModel, json.dumps(content).encode(), "measured model")
        _check(model)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: {error}") from error
    return model


def shipped_models() -> dict[str, Path]:
    """Return the files that come with the simulator, by model."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.json")) if path != GENERATION_FILE}


def profiled_models(cache_dir: Path, files: Sequence[Path], precision: str = FP32) -> dict[str, MeasuredModel]:
    """Return measured models by name: of the newest profile in a cache in this precision, or of the files.

    Raises ProfileError for a file that is wrong.
    """
    return with_files(cached_models(cache_dir, precision), [read_measured(path) for path in files])


class CachedModel(NamedTuple):
    """A model that a cache has a profile of, and when it was measured, in seconds of Unix time.

    `shape`: its first input, with the sizes that were measured, for people. `shapes`: of all profiles of this name.
    `is_open`: of any sizes, as onnxruntime computes those that are not compiled.
    """

    model: MeasuredModel
    measured_s: float
    shape: str
    shapes: frozenset[str]
    is_open: bool


def with_files(cached: Mapping[str, CachedModel], of_files: Sequence[MeasuredModel]) -> dict[str, MeasuredModel]:
    """Return the models of a cache, or of files, which count more, by name."""
    return {name: each.model for name, each in cached.items()} | {model.model_name: model for model in of_files}


def cached_models(cache_dir: Path, precision: str = FP32) -> dict[str, CachedModel]:
    """Return the newest measurement of each model in a cache, by all names under which servers have loaded it.

    The cache may have a model in several precisions and sizes.
    """
    found: dict[str, CachedModel] = {}
    for path in sorted((cache_dir / PROFILES_FOLDER).glob("*.json"), key=lambda path: path.stat().st_mtime):
        try:
            profile, manifest = _profiled(path)
            model = measured_model([profile], manifest)
        except ProfileError:  # of an artifact that has gone, or of another version
            continue
        if manifest.precision != precision:
            continue
        first = manifest.inputs[0]
        shape, is_open = f"{first.name} {list(first.shape)}", -1 in first.shape[1:]
        for name in (profile.model_name, *other_names(path)):
            shapes = (found[name].shapes if name in found else frozenset()) | {shape}
            named = replace(model, model_name=name)
            found[name] = CachedModel(named, path.stat().st_mtime, shape, shapes, is_open)
    return found


def one_row(model: MeasuredModel) -> MeasuredModel:
    """Return a model as if it had been measured with one row only: all its versions, each with its own slope."""
    return replace(
        model,
        batches=(1,),
        batch_us=tuple(tuple(row[:1] for row in grid) for grid in model.batch_us),
        isolated_us=tuple(row[:1] for row in model.isolated_us),
        together_us=tuple(row[:1] for row in model.together_us),
    )


def measured_model(
    sessions: Sequence[Profile], manifest: Manifest, kernel_generation: int = UNKNOWN_GENERATION
) -> MeasuredModel:
    """Return what the simulator needs of sessions and the artifact that was measured. Raises ProfileError."""
    profile = merge(sessions)
    if profile.key != manifest.key or len(profile.layers) != len(manifest.layers):
        raise ProfileError(f"the profile of {profile.model_name} is not that of the artifact")
    disturbed = bool(profile.interference)
    kernels = [layer.versions[0].batch for layer in manifest.layers]
    return MeasuredModel(
        model_name=profile.model_name,
        cpu=profile.machine.cpu,
        target=profile.machine.target,
        cores=profile.cores,
        latency_us=tuple(
            tuple(tuple(row[0] for row in version) for version in layer.latency_us) for layer in profile.layers
        ),
        slope=tuple(layer.slope if disturbed else (0.0,) * len(layer.latency_us) for layer in profile.layers),
        tasks=tuple(tuple(version.tasks for version in layer.versions) for layer in manifest.layers),
        memory_us=tuple(layer.memory_us for layer in profile.layers),
        compute_us=tuple(layer.compute_us for layer in profile.layers),
        batches=profile.batches,
        batch_us=tuple(layer.latency_us[0] for layer in profile.layers),
        isolated_us=profile.isolated_us,
        together_us=profile.together_us,
        kernel_rows=tuple(kernel.rows if kernel else 0 for kernel in kernels),
        kernel_tasks=tuple(kernel.tasks if kernel else 0 for kernel in kernels),
        sessions=len(sessions),
        spread=session_spread(sessions),
        cores_whole=max(session.cores_whole for session in sessions),
        row_bytes=sum(tensor.row_bytes for tensor in (*manifest.inputs, *manifest.outputs)),
        kernel_generation=kernel_generation,
    )


def session_spread(sessions: Sequence[Profile]) -> float:
    """Return `MeasuredModel.spread`. Of one session: twice the standard deviation of two medians' difference."""
    if len(sessions) == 1:
        return doubt(sessions[0].scatter, sessions[0].runs[0])
    ranked = [
        sorted(session.isolated_us[index][0] for session in sessions)[:COMPARED_SESSIONS]
        for index in range(len(sessions[0].cores))
    ]
    return max(times_us[-1] / times_us[0] - 1 for times_us in ranked)


def encode_measured(model: MeasuredModel) -> bytes:
    """Return JSON text, numbers rounded to four digits."""
    fields = {name: _rounded(value) for name, value in asdict(model).items()}
    lines = (f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}" for name, value in fields.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def merge(profiles: Sequence[Profile]) -> Profile:
    """Return the quietest of several profiles of one artifact, layer by layer, for the batches that all of them have.

    Raises ProfileError.
    """
    first = profiles[0]
    if any(
        (profile.cores, profile.machine.machine_id) != (first.cores, first.machine.machine_id) for profile in profiles
    ):
        raise ProfileError(f"profiles of {first.model_name} on different machines or numbers of cores")
    disturbed = max(profiles, key=_interference)
    batches = tuple(rows for rows in first.batches if all(rows in profile.batches for profile in profiles))
    layers = []
    for index, layer in enumerate(disturbed.layers):
        grids = [profile.layers[index].latency_us for profile in profiles]
        latency_us = tuple(_minimum([grid[version] for grid in grids]) for version in range(len(layer.latency_us)))
        layers.append(replace(layer, latency_us=latency_us))
    return replace(
        disturbed,
        layers=tuple(layers),
        batches=batches,
        isolated_us=_minimum([profile.isolated_us for profile in profiles]),
        together_us=_minimum([profile.together_us for profile in profiles]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 for a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m gangway.simulator.measured", description=__doc__)
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE", help="files of `gangway profile`")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, metavar="DIR", help="where to write (the room's)")
    add_cache_dir(parser)
    options = parser.parse_args(argv)
    try:
        by_key: dict[str, list[Profile]] = {}
        for path in options.profiles:
            profile = read_profile(path)
            by_key.setdefault(profile.key, []).append(profile)
        generation = current_generation().number
        for key, sessions in by_key.items():
            model = measured_model(sessions, read_manifest(options.cache_dir / key), generation)
            target = options.output / f"{model.model_name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, encode_measured(model))
            print(f"{target}: {len(model.latency_us)} layers, {len(sessions)} sessions, spread {model.spread:.1%}")
    except (ProfileError, ArtifactError, GenerationError, OSError) as error:
        print(f"measured: {error}", file=sys.stderr)
        return 1
    return 0


def _profiled(path: Path) -> tuple[Profile, Manifest]:
    """Return a profile, and what the cache around it says of the artifact. Raises ProfileError."""
    profile = read_profile(path)
    try:
        return profile, read_manifest(path.resolve().parent.parent / profile.key)
    except ArtifactError as error:
        message = (
            f"{path}: its artifact is needed, too (numbers of tasks); give the file in the cache's folder: {error}"
        )
        raise ProfileError(message) from error


def _check(model: MeasuredModel) -> None:
    layers = len(model.latency_us)
    _require(model.format_version == FORMAT_VERSION, f"format version {model.format_version} is not {FORMAT_VERSION}")
    _require(model.cores[:1] == (1,) and list(model.cores) == sorted(set(model.cores)), "cores do not ascend from 1")
    _require(layers > 0, "there is no layer")
    _require(model.batches[:1] == (1,) and list(model.batches) == sorted(set(model.batches)), "batches do not ascend")
    lengths = {len(model.slope), len(model.tasks), len(model.memory_us), len(model.compute_us), len(model.batch_us)}
    lengths |= {len(model.kernel_rows), len(model.kernel_tasks)}
    _require(lengths == {layers}, f"a field does not have {layers} layers")
    for times, slopes, tasks in zip(model.latency_us, model.slope, model.tasks, strict=True):
        _require(len(times) == len(slopes) == len(tasks) > 0, "a layer has no version, or fields differ in versions")
        for row in times:
            _require(len(row) == len(model.cores) and min(row) > 0, "a layer lacks a time, or has one that is not > 0")
    _require(all(count > 0 for layer in model.tasks for count in layer), "a layer has no tasks")
    kernels = zip(model.kernel_rows, model.kernel_tasks, strict=True)
    _require(
        all((rows > 0) == (tasks > 0) and rows >= 0 for rows, tasks in kernels), "a kernel has no rows or no tasks"
    )
    _require(model.sessions > 0 and model.spread >= 0, "there is no session, or a negative spread")
    _require(0 < model.cores_whole <= 1, "cores_whole is not a share")
    _require(min(model.memory_us) >= 0 and min(model.compute_us) >= 0, "a time is negative")
    _require(model.row_bytes >= 0, "a number of bytes is negative")
    shape = [len(model.batches)] * len(model.cores)
    for grid in (*model.batch_us, model.isolated_us, model.together_us):
        _require(
            [len(row) for row in grid] == shape, f"a field is not {len(shape)} cores x {len(model.batches)} batches"
        )
        _require(all(time_us > 0 for row in grid for time_us in row), "a time of a batch is not > 0")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _minimum(grids: Sequence[Grid]) -> Grid:
    """Return the smallest time of each place that all grids have: batches are the first powers of two."""
    return tuple(tuple(min(times_us) for times_us in zip(*rows, strict=False)) for rows in zip(*grids, strict=True))


def _interference(profile: Profile) -> tuple[bool, float]:
    """Return whether levels rise with the load, and how high they are."""
    kinds = {point.kind for point in profile.interference}
    rising = True
    for kind in kinds:
        levels = [p.level for p in sorted(profile.interference, key=lambda p: p.share) if p.kind == kind]
        rising &= levels == sorted(levels) and levels[-1] < MAX_LEVEL
    return rising, sum(point.level**2 for point in profile.interference)


if __name__ == "__main__":
    sys.exit(main())
