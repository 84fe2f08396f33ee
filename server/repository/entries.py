"""What a model repository holds: versions of models that are to be served, and those that cannot be."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.messages import WHOLE_MODEL
from gangway.server.models.config import Qos, is_ensemble

Stamp: TypeAlias = tuple[tuple[str, int, int, int], ...]  # path within the model's folder, bytes, mtime in ns, inode


@dataclass(frozen=True, eq=False)
class Override:
    """What a load request brought along. `config` or `folder` (of files) None: what the repository has."""

    config: ModelConfig | None
    folder: Path | None


@dataclass(frozen=True)
class ModelVersion:
    """One version that is to be served. `config` is as written: complete it with the compiled model's signature.

    `override`: what a client has sent in place of the repository's files. `stamp` tells whether the files are the same.
    `without_effect`: what the model's owner has said in vain, for the log; only the highest version has it.
    """

    name: str
    version: int
    path: Path  # the ONNX file; an ensemble has none there
    config: ModelConfig
    qos: Qos
    stamp: Stamp = ()
    override: Override | None = None
    without_effect: tuple[str, ...] = ()

    @property
    def is_ensemble(self) -> bool:
        """Whether it is made of other models, and has no file."""
        return is_ensemble(self.config)

    @property
    def folder(self) -> Path:
        """The model's folder, which holds those of its versions."""
        return self.path.parents[1]

    def is_same(self, other: "ModelVersion") -> bool:
        """Whether loading the other one would change nothing."""
        return self.stamp == other.stamp and self.override is other.override


@dataclass(frozen=True)
class BrokenModel:
    """An entry that cannot be served. `version` is WHOLE_MODEL when the reason concerns the model as a whole.

    `at_fault`: its requests ended worker processes.
    """

    name: str
    version: int
    reason: str
    at_fault: bool = False

    def __post_init__(self) -> None:
        # Names of files that are no UTF-8 have surrogates, which no message to a client can hold.
        object.__setattr__(self, "reason", self.reason.encode(errors="backslashreplace").decode())

    @property
    def is_whole(self) -> bool:
        """Whether the reason concerns no single version."""
        return self.version == WHOLE_MODEL


Entry = ModelVersion | BrokenModel
