"""How the level of interference follows from counters of the processor on one machine, as data.

VELTAIR (ASPLOS 2022, section 4.3): a linear model of two counters, accesses to the last-level cache and the share of
them that misses. It lies among the profiles, because it rests on the samples in all of them. Only the standard
library.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gangway.artifact.codec import decode_record
from gangway.artifact.files import write_whole
from gangway.artifact.profile import ProfileError

PROXY_VERSION = 3


@dataclass(frozen=True)
class InterferenceProxy:
    """level = constant + per_access x accesses + per_miss_rate x misses / accesses.

    Accesses are those of a core in a thousand cycles. `pca_share`: the share of the variance of all counters
    (in their own units of deviation) that their first two principal components have. `r_squared`: the share of the
    levels' variance that the line explains.
    """

    machine_id: str
    accesses: str  # name of the event that was counted
    misses: str
    constant: float
    per_access: float
    per_miss_rate: float
    pca_share: float
    r_squared: float
    samples: int
    models: int  # that the samples are of, by artifact
    format_version: int = PROXY_VERSION

    def level(self, accesses: float, misses: float) -> float:
        """Return the level that these counters speak of; never below 0."""
        miss_rate = misses / accesses if accesses > 0 else 0.0
        return max(0.0, self.constant + self.per_access * accesses + self.per_miss_rate * miss_rate)


def proxy_path(profiles: Path, machine: str) -> Path:
    """Where the proxy of a machine (by its id) lies in the folder of profiles."""
    return profiles / f"proxy-{machine}.json"


def write_proxy(profiles: Path, proxy: InterferenceProxy) -> Path:
    """Write it to its place, whole or not at all, over an older one; return the path. Raises OSError."""
    path = proxy_path(profiles, proxy.machine_id)
    write_whole(path, json.dumps(asdict(proxy), indent=1).encode())
    return path


def read_proxy(path: Path) -> InterferenceProxy:
    """Return the proxy in a file. Raises ProfileError that names file and field."""
    try:
        proxy = decode_record(InterferenceProxy, path.read_bytes(), "proxy")
        if proxy.format_version != PROXY_VERSION:
            raise ValueError(f"format version {proxy.format_version} instead of {PROXY_VERSION}")
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(f"{path}: {error}") from error
    return proxy
