"""Mixes: which models are queried, how often each, and its latency target."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gangway.workload.qos import Qos, WorkloadError, parse_qos


@dataclass(frozen=True)
class MixModel:
    """A model's share of a mix. No weight: inversely proportional to its target, once that is known (`resolve`)."""

    name: str
    weight: float | None = None
    qos: Qos | None = None  # None: best effort


@dataclass(frozen=True)
class Mix:
    """Models that are queried together, in the order that indices refer to."""

    name: str
    models: tuple[MixModel, ...]

    def __post_init__(self) -> None:
        names = self.names
        if not names:
            raise WorkloadError(f"mix '{self.name}' has no models")
        if twice := {name for name in names if names.count(name) > 1}:
            raise WorkloadError(f"mix '{self.name}' has a model twice: {', '.join(sorted(twice))}")
        for model in self.models:
            if model.weight is not None and not (math.isfinite(model.weight) and model.weight > 0):
                raise WorkloadError(f"{model.name}: its weight must be a positive number, not {model.weight}")

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names."""
        return tuple(model.name for model in self.models)

    def with_qos(self, qos: Qos | None) -> "Mix":
        """Return the mix with this target for every model. Weights that follow targets follow the new ones."""
        return replace(self, models=tuple(replace(model, qos=qos) for model in self.models))

    def resolve(self, isolated_us: Mapping[str, float] | None = None) -> "Mix":
        """Return the mix with targets in milliseconds and shares as weights, which add up to 1.

        `isolated_us`: each model's isolated latency; needed where targets are multiples of it. Raises WorkloadError.
        """
        isolated = isolated_us or {}
        resolved = [_resolve_target(model, isolated.get(model.name)) for model in self.models]
        weights = [_weight_of(model) for model in resolved]
        if len({model.weight is None for model in self.models}) > 1:
            raise WorkloadError(f"mix '{self.name}': either every model has a weight or none")
        total = sum(weights)
        models = (replace(model, weight=weight / total) for model, weight in zip(resolved, weights, strict=True))
        return replace(self, models=tuple(models))

    @property
    def shares(self) -> tuple[float, ...]:
        """Each model's share of the queries. Raises WorkloadError before `resolve`, when there are no weights."""
        weights = [model.weight for model in self.models]
        if any(weight is None for weight in weights):
            raise WorkloadError(f"mix '{self.name}': weights follow targets; resolve them first")
        total = math.fsum(weight or 0.0 for weight in weights)
        return tuple((weight or 0.0) / total for weight in weights)


def capacity_per_s(mix: Mix, isolated_us: Mapping[str, float]) -> float:
    """Return 1 / the mean isolated latency of a resolved mix: the rate of a machine that runs one query at a time."""
    pairs = zip(mix.names, mix.shares, strict=True)
    return 1e6 / math.fsum(share * isolated_us[name] for name, share in pairs)


# Latency targets in ms on 64 cores (VELTAIR, ASPLOS 2022, table 2), under the names of `gangway zoo`.
VELTAIR_QOS_MS = {
    "efficientnet_b0": 10.0,
    "mobilenetv2": 10.0,
    "tiny_yolov2": 10.0,
    "resnet50": 15.0,
    "googlenet": 15.0,
    "ssd_resnet34": 100.0,
    "bert_large": 130.0,
}


def _veltair(name: str, *models: str) -> Mix:
    return Mix(name, tuple(MixModel(model, qos=Qos(milliseconds=VELTAIR_QOS_MS[model])) for model in models))


BUILTIN: Mapping[str, Mix] = {
    mix.name: mix
    for mix in (
        _veltair("light", "efficientnet_b0", "mobilenetv2", "tiny_yolov2"),
        _veltair("medium", "resnet50", "googlenet"),
        _veltair("heavy", "ssd_resnet34", "bert_large"),
        _veltair("mix", *VELTAIR_QOS_MS),
    )
}


def read_mix(name_or_path: str) -> Mix:
    """Return a built-in mix, or read one from a .toml or .json file.

    Raises WorkloadError for an unknown name or a wrong file, OSError for one that cannot be read.
    """
    if name_or_path in BUILTIN:
        return BUILTIN[name_or_path]
    path = Path(name_or_path)
    if path.suffix not in (".toml", ".json"):
        known = f"known: {', '.join(BUILTIN)}, .toml and .json files, and models with weights, as {name_or_path}=1"
        raise WorkloadError(f"unknown mix '{name_or_path}'; {known}")
    text = path.read_text()
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from error
    try:
        return _mix_of(content, path.stem)
    except WorkloadError as error:
        raise WorkloadError(f"{path}: {error}") from error


def parse_mix(text: str) -> Mix:
    """Read "resnet50=3,googlenet=1": models and their weights. Raises WorkloadError."""
    models = []
    for part in text.split(","):
        name, _, weight = part.strip().rpartition("=")
        try:
            models.append(MixModel(name, float(weight)))
        except ValueError as error:
            raise WorkloadError(f'expected "MODEL=WEIGHT,MODEL=WEIGHT", got "{part}"') from error
        if not name:
            raise WorkloadError(f'expected "MODEL=WEIGHT,MODEL=WEIGHT", got "{part}"')
    return Mix(text, tuple(models))


def _mix_of(content: Any, default_name: str) -> Mix:
    if not isinstance(content, dict) or not isinstance(content.get("models"), list):
        raise WorkloadError("expected a list 'models'")
    _refuse_unknown(content, {"name", "models"}, "mix")
    return Mix(str(content.get("name", default_name)), tuple(_model_of(entry) for entry in content["models"]))


def _model_of(entry: Any) -> MixModel:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise WorkloadError("every model needs a 'name'")
    _refuse_unknown(entry, {"name", "weight", "qos"}, f"model '{entry['name']}'")
    weight, qos = entry.get("weight"), entry.get("qos")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise WorkloadError(f"{entry['name']}: its weight must be a number, not {weight!r}")
    target = None if qos is None else parse_qos(str(qos))
    return MixModel(entry["name"], None if weight is None else float(weight), target)


def _refuse_unknown(content: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(content.keys() - known):
        raise WorkloadError(f"{what}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def _resolve_target(model: MixModel, isolated_us: float | None) -> MixModel:
    if model.qos is None:
        return model
    try:
        return replace(model, qos=Qos(milliseconds=model.qos.resolve_us(isolated_us) / 1000))
    except WorkloadError as error:
        raise WorkloadError(f"{model.name}: {error}") from error


def _weight_of(model: MixModel) -> float:
    if model.weight is not None:
        return model.weight
    if model.qos is None:
        raise WorkloadError(f"{model.name}: it needs a weight or a target")
    return 1 / model.qos.value
