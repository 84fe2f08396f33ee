"""Samples of a tuning that is not finished: what a killed one had measured is not measured again."""

import json
import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gangway.artifact.codec import decode_record
from gangway.artifact.files import write_whole

_log = logging.getLogger(__name__)


@dataclass
class KeptSamples:
    """`latency_us[k][knobs]`: alone on all `cores` cores, one row, kernel k."""

    key: str  # of the artifact of static choices
    cores: int
    isolated_us: float = 0.0  # the whole model, static choices
    latency_us: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _Record:
    key: str
    cores: int
    isolated_us: float
    latency_us: tuple[dict[str, float], ...]


def write_kept(path: Path, samples: KeptSamples) -> None:
    """Write the samples, whole or not at all. Raises OSError."""
    write_whole(path, json.dumps(asdict(samples)).encode())


def read_kept(path: Path, key: str, cores: int, kernels: int) -> KeptSamples:
    """Return the samples of this artifact on so many cores; none if there are none. A damaged file is logged."""
    fresh = KeptSamples(key, cores, 0.0, [{} for _ in range(kernels)])
    try:
        record = decode_record(_Record, path.read_bytes(), "samples")
    except FileNotFoundError:
        return fresh
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("damaged samples ignored: %s: %s", path, error)
        return fresh
    if (record.key, record.cores, len(record.latency_us)) != (key, cores, kernels):
        return fresh
    return KeptSamples(record.key, record.cores, record.isolated_us, list(record.latency_us))
