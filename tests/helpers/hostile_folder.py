"""A folder whose files are called like modules; whatever imports one of them is recorded, and fails."""

import sys
from pathlib import Path

TRAP = "with open({record!r}, 'a') as file:\n    file.write({name!r} + '\\n')\nraise SystemExit({name!r})\n"
# `python -m` itself imports a few modules of the standard library before any of ours; none of these.
SITE = frozenset({"sitecustomize", "usercustomize"})  # which Python takes from PYTHONPATH before it runs the command
OTHERS = frozenset({"queue", "json", "socket", "logging", "numpy", "grpc", "onnx", "onnxruntime", "tvm", "msgspec"})
ALL = SITE | OTHERS | sys.stdlib_module_names


def hostile_folder(folder: Path, names: frozenset[str]) -> Path:
    """A folder with a file for each module, a package called as ours and as a model's version; `record` tells all."""
    record = str(folder / "record")
    (folder / "gangway" / "executor").mkdir(parents=True)
    (folder / "1").mkdir()
    for place in (folder / "gangway" / "executor" / "__init__.py", folder / "1" / "__init__.py"):
        place.write_text(TRAP.format(record=record, name=f"{place.parent.name}/"))
    for name in names | {"model", "triton_python_backend_utils"}:
        (folder / f"{name}.py").write_text(TRAP.format(record=record, name=name))
    (folder / "pyproject.toml").write_text("not TOML")
    return folder


def imported(folder: Path) -> list[str]:
    """What has been imported of a hostile folder."""
    record = folder / "record"
    return sorted(set(record.read_text().split())) if record.exists() else []
