"""What compilations take: paths of models, and the options that decide their artifacts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from gangway.artifact.format import Precision, TargetSpec
from gangway.artifact.instances import SizeSpan
from gangway.compiler.errors import ModelError

NO_DIMENSIONS: Mapping[str, int] = MappingProxyType({})
MODEL_FILE = "model.onnx"


@dataclass(frozen=True)
class CompileOptions:
    """What decides an artifact beside the ONNX file and the target.

    `dimensions` gives values to symbolic dimensions, each set of which is tuned by itself. `optional` names inputs
    that requests may leave out, since they have initializers, too; such a model is left to onnxruntime. `with_batch`: a
    model whose first dimension cannot be a batch is not wanted. `whole`: it is left to onnxruntime, because the first
    dimensions of its inputs may differ. `uncompiled`: why it is, for now. `keep_fp32` names layers that keep float32,
    whatever the `precision` is. `span`: one artifact for several sizes, in float32.
    """

    dimensions: Mapping[str, int] = field(default_factory=lambda: NO_DIMENSIONS)
    optional: Sequence[str] = ()
    with_batch: bool = False
    whole: bool = False
    uncompiled: str | None = None
    precision: Precision = "fp32"
    keep_fp32: tuple[str, ...] = ()
    span: SizeSpan | None = None

    @property
    def refusal(self) -> str:
        """Why the model is left to onnxruntime without an attempt; empty: it is compiled."""
        if self.optional:
            return f"it has optional inputs: {', '.join(self.optional)}"
        return self.uncompiled or ("first dimensions of its inputs may differ" if self.whole else "")


NO_OPTIONS = CompileOptions()


@dataclass(frozen=True)
class ModelSource:
    """An ONNX file, its model's name, the key of the artifact that is made of it, and the target of that."""

    path: Path
    model_name: str
    key: str
    target: TargetSpec


def find_models(path: Path) -> list[tuple[str, Path]]:
    """Return (name, ONNX file) for an .onnx file, or for every version of a model directory, oldest first.

    A file that lies in a repository, REPOSITORY/NAME/VERSION/model.onnx, is called NAME, any other by its own name.
    Raises ModelError if there is nothing to compile.
    """
    if path.is_dir():
        versions = sorted(
            (folder for folder in path.iterdir() if folder.name.isdecimal()), key=lambda item: int(item.name)
        )
        files = [folder / MODEL_FILE for folder in versions if (folder / MODEL_FILE).is_file()]
        if not files:
            raise ModelError(f"{path} holds no version with a {MODEL_FILE} (as {path.name}/1/{MODEL_FILE})")
        return [(path.resolve().name, file) for file in files]
    if not path.is_file():
        raise ModelError(f"{path} does not exist")
    in_repository = path.name == MODEL_FILE and path.resolve().parent.name.isdigit()
    return [(path.resolve().parents[1].name if in_repository else path.stem, path)]
