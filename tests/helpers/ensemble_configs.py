"""Configurations of ensembles, written short."""

from collections.abc import Sequence
from pathlib import Path

Step = tuple[str, str, str]  # model, "input=tensor ...", "tensor=output ..."


def config_of(inputs: str, outputs: str, steps: Sequence[Step], batch: int = 4, more: str = "") -> str:
    """`inputs`, `outputs`: "NAME:TYPE:DIM,DIM ..."."""
    return "\n".join(
        [
            f'platform: "ensemble" max_batch_size: {batch} {more}',
            *(_tensor("input", text) for text in inputs.split()),
            *(_tensor("output", text) for text in outputs.split()),
            "ensemble_scheduling {",
            *(_step(*step) for step in steps),
            "}",
        ]
    )


def write(repository: Path, name: str, config: str, version: int = 1) -> None:
    """An ensemble as Triton wants it: a version folder with nothing in it."""
    (repository / name / str(version)).mkdir(parents=True, exist_ok=True)
    beside = repository / name / ".config.pbtxt"
    beside.write_text(config)
    beside.rename(repository / name / "config.pbtxt")


def _tensor(group: str, text: str) -> str:
    name, kind, dims = text.split(":")
    return f'{group} {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}'


def _step(model: str, inputs: str, outputs: str) -> str:
    name, _, version = model.partition("@")
    maps = [("input_map", pair) for pair in inputs.split()] + [("output_map", pair) for pair in outputs.split()]
    texts = [
        f'{group} {{ key: "{key}" value: "{value}" }}' for group, (key, value) in ((g, p.split("=")) for g, p in maps)
    ]
    return f'step {{ model_name: "{name}" model_version: {version or -1} {" ".join(texts)} }}'
