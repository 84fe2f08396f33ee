"""Which machine code the kernels are built from: the host's instruction set, detected and never assumed.

A target is one of the x86-64 psABI levels (v1, v3, v4), by LLVM's names. A level states exactly which instructions may
appear, so an artifact can be checked against /proc/cpuinfo. Tuning for one model of CPU (znver4, sapphirerapids, ...)
measured no faster.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from gangway.artifact.format import Precision, TargetSpec
from gangway.base.host_limits import cpu_flags
from gangway.compiler.amx_permission import tiles_work
from gangway.compiler.frontend.onnx_file import split

_V3: Final = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4: Final = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

TARGETS: Final = {
    "avx512": TargetSpec(name="avx512", cpu="x86-64-v4", lanes=16, features=(*_V3, *_V4)),
    "avx2": TargetSpec(name="avx2", cpu="x86-64-v3", lanes=8, features=_V3),
    "baseline": TargetSpec(name="baseline", cpu="x86-64", lanes=4, features=("sse2",)),
}
"""Every target, best first."""

# By target: what kernels of low precision use where the machine has it, by LLVM's name and by that in /proc/cpuinfo.
EXTENSIONS: Final = {
    "avx512": {
        "amx_bf16": "amx-bf16",
        "amx_int8": "amx-int8",
        "amx_tile": "amx-tile",
        "avx512_bf16": "avx512bf16",
        "avx512_vnni": "avx512vnni",
        "avx512vbmi": "avx512vbmi",
    },
    "avx2": {"avx_vnni": "avxvnni"},
    "baseline": {},
}


_TILES: Final = "amx_"  # what extensions that need tiles begin with
_BY_PRECISION: Final[Mapping[Precision, tuple[str, ...]]] = {
    "fp32": (),
    "bf16": ("amx_bf16", "amx_tile", "avx512_bf16"),
}


_OF_INTEGERS: Final = ("amx_int8", "amx_tile", "avx512_vnni", "avx512vbmi")
_QUANTISES: Final = (b"QuantizeLinear", b"DynamicQuantize", b"MatMulInteger", b"QLinear")  # parts of operators' names


class UnsupportedTargetError(ValueError):
    """The wanted target is unknown, or this machine lacks instructions it needs."""


def machine_features() -> frozenset[str]:
    """Return the host's CPU flags. Raises UnsupportedTargetError where there are none."""
    if flags := cpu_flags():
        return flags
    raise UnsupportedTargetError("/proc/cpuinfo names no CPU flags: this is not an x86-64 Linux")


def supported(target: TargetSpec, features: frozenset[str]) -> bool:
    """Whether a machine with these CPU flags can run code built for `target`."""
    return features.issuperset((*target.features, *target.extensions))


def extended(target: TargetSpec, features: frozenset[str] | None = None) -> TargetSpec:
    """Return the target with what a machine with these CPU flags, by default this one, has for low precision.

    Of this one, tiles count only if they work.
    """
    found = features if features is not None else machine_features()
    names = [name for name in EXTENSIONS[target.name] if name in found]
    if features is None and any(name.startswith(_TILES) for name in names) and not tiles_work():
        names = [name for name in names if not name.startswith(_TILES)]
    return replace(target, extensions=tuple(names))


def for_precision(target: TargetSpec, precision: Precision, features: frozenset[str] | None = None) -> TargetSpec:
    """Return the target with what kernels of a precision use of a machine; without extensions they are of float32."""
    if precision == "fp32":
        return replace(target, extensions=())
    wanted = _BY_PRECISION[precision]
    found = extended(target, features).extensions
    return replace(target, extensions=tuple(name for name in found if name in wanted))


def for_file(path: Path, target: TargetSpec, precision: Precision) -> TargetSpec:
    """Return `for_precision`, with what kernels of 8-bit numbers use of this machine if the model is quantised."""
    chosen = for_precision(target, precision)
    try:
        content = split(path)[0]
        quantised = any(name in content for name in _QUANTISES)
    except OSError:  # which is told when the file is read as a model
        quantised = False
    if not quantised:
        return chosen
    found = [name for name in extended(target).extensions if name in _OF_INTEGERS]
    if "avx512_vnni" not in found:
        return chosen
    return replace(chosen, extensions=tuple(sorted({*chosen.extensions, *found})))


def attributes(target: TargetSpec) -> list[str]:
    """Return LLVM's names of the extensions."""
    return [f"+{EXTENSIONS[target.name][name]}" for name in target.extensions]


def detect(name: str | None = None) -> TargetSpec:
    """The best target this machine runs, or the one called `name` ("avx512", "avx2", "baseline").

    Raises `UnsupportedTargetError` if `name` is unknown or the machine cannot run it.
    """
    features = machine_features()
    if name is None:
        return next(target for target in TARGETS.values() if supported(target, features))
    if name not in TARGETS:
        raise UnsupportedTargetError(f"unknown target {name!r}, expected one of {', '.join(TARGETS)}")
    if not supported(TARGETS[name], features):
        missing = ", ".join(sorted(set(TARGETS[name].features) - features))
        raise UnsupportedTargetError(f"this machine cannot run {name} kernels: it lacks {missing}")
    return TARGETS[name]
