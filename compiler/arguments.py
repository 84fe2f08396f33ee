"""What the commands of the compiler take: paths of models."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from gangway.compiler.errors import ModelError

NO_DIMENSIONS: Mapping[str, int] = MappingProxyType({})
MODEL_FILE = "model.onnx"


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
