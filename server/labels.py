"""Names of classes: the file that `label_filename` of an output names, one name per line."""

from collections.abc import Mapping
from pathlib import Path

from gangway.artifact.files import file_beside, require_regular
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.config_error import ConfigError, shortened

MAX_LABEL_BYTES = 16 << 20


def label_files(folder: Path, config: ModelConfig) -> dict[str, str]:
    """Return the label file of each output that has one, `folder` being the model's. Raises ConfigError.

    A name that leads out of the folder is refused: clients may load configurations, and see the labels.
    """
    files = {}
    for output in config.output:
        if output.label_filename:
            where = f"output '{shortened(output.name)}': label_filename '{shortened(output.label_filename)}'"
            files[output.name] = str(_checked(folder, output.label_filename, where))
    return files


def read_labels(path: Path) -> tuple[str, ...]:
    """Return the names, by class. Raises OSError, or ValueError for what is too large, no file, or no text."""
    require_regular(path)
    if path.stat().st_size > MAX_LABEL_BYTES:
        raise ValueError(f"more than {MAX_LABEL_BYTES} bytes")
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    return tuple(line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1]))


def labels_of(files: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the names of each output's classes. A file that has gone since it was checked has none."""
    labels = {}
    for output, path in files.items():
        try:
            labels[output] = read_labels(Path(path))
        except (OSError, ValueError):
            labels[output] = ()
    return labels


def _checked(folder: Path, name: str, where: str) -> Path:
    try:
        path = file_beside(folder, name)
        read_labels(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{where} cannot be read: {reason}") from error
    return path
