"""Write the small files that the simulator takes models from: `python -m gangway.simulator.pack PROFILE ...`.

Each PROFILE is a file of `gangway profile` in the cache's folder, beside whose artifact it lies. Of several profiles of
one artifact each time is the smallest: each is a median, and what else the machine did only adds to it. Slopes are of
the profile in which the generators were felt most, of those whose levels rise with the load (else it was something
else that was felt).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gangway.artifact.cache import add_cache_dir
from gangway.artifact.profile import Profile, ProfileError, read_profile
from gangway.artifact.reader import ArtifactError, read_manifest
from gangway.artifact.writer import write_whole
from gangway.simulator.measured import FOLDER, encode_measured, measured_model

Grid = tuple[tuple[float, ...], ...]
MAX_LEVEL = 1.5  # two cores that share one core's bandwidth make 1; beyond that somebody else was at work


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 for a file that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m gangway.simulator.pack", description=__doc__)
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE", help="files of `gangway profile`")
    parser.add_argument("-o", "--output", type=Path, default=FOLDER, metavar="DIR", help="where to write (the room's)")
    add_cache_dir(parser)
    options = parser.parse_args(argv)
    try:
        by_key: dict[str, list[Profile]] = {}
        for path in options.profiles:
            profile = read_profile(path)
            by_key.setdefault(profile.key, []).append(profile)
        for key, profiles in by_key.items():
            merged = merge(profiles)
            model = measured_model(merged, read_manifest(options.cache_dir / key))
            target = options.output / f"{merged.model_name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole(target, encode_measured(model))
            print(f"{target}: {len(merged.layers)} layers, of {len(profiles)} profiles")
    except (ProfileError, ArtifactError, OSError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    return 0


def merge(profiles: Sequence[Profile]) -> Profile:
    """Return the quietest of several profiles of one artifact, layer by layer, for the batches that all of them have.

    Raises ProfileError.
    """
    first = profiles[0]
    if any(
        (profile.cores, profile.machine.machine_id) != (first.cores, first.machine.machine_id) for profile in profiles
    ):
        raise ProfileError(f"profiles of {first.model_name} on different machines or numbers of cores")
    disturbed = max(profiles, key=_felt)
    batches = tuple(rows for rows in first.batches if all(rows in profile.batches for profile in profiles))
    layers = []
    for index, layer in enumerate(disturbed.layers):
        grids = [profile.layers[index].latency_us for profile in profiles]
        latency_us = tuple(_least([grid[version] for grid in grids]) for version in range(len(layer.latency_us)))
        layers.append(replace(layer, latency_us=latency_us))
    return replace(
        disturbed,
        layers=tuple(layers),
        batches=batches,
        isolated_us=_least([profile.isolated_us for profile in profiles]),
        together_us=_least([profile.together_us for profile in profiles]),
    )


def _least(grids: Sequence[Grid]) -> Grid:
    """Return the smallest time of each place that all grids have: batches are the first powers of two."""
    return tuple(tuple(min(times_us) for times_us in zip(*rows, strict=False)) for rows in zip(*grids, strict=True))


def _felt(profile: Profile) -> tuple[bool, float]:
    """Return whether levels rise with the load, and how high they are."""
    kinds = {point.kind for point in profile.interference}
    rising = True
    for kind in kinds:
        levels = [p.level for p in sorted(profile.interference, key=lambda p: p.share) if p.kind == kind]
        rising &= levels == sorted(levels) and levels[-1] < MAX_LEVEL
    return rising, sum(point.level**2 for point in profile.interference)


if __name__ == "__main__":
    sys.exit(main())
