"""Latency targets: milliseconds, or a multiple of a model's isolated latency."""

import math
from dataclasses import dataclass


class WorkloadError(ValueError):
    """A mix, a trace or a target is wrong. The message is for the user."""


@dataclass(frozen=True)
class Qos:
    """A latency target, from arrival to answer: exactly one of the two is given."""

    milliseconds: float | None = None
    multiple: float | None = None

    def __post_init__(self) -> None:
        if (self.milliseconds is None) == (self.multiple is None):
            raise WorkloadError("a target is either milliseconds or a multiple of the isolated latency")
        if not (math.isfinite(self.value) and self.value > 0):
            raise WorkloadError(f"a target must be a positive number, not {self.value}")

    @property
    def value(self) -> float:
        """The number that is given."""
        given = self.milliseconds if self.milliseconds is not None else self.multiple
        assert given is not None
        return given

    def resolve_us(self, isolated_us: float | None) -> float:
        """Return microseconds. Raises WorkloadError for a multiple of an isolated latency that is not known."""
        if self.milliseconds is not None:
            return self.milliseconds * 1000
        if not isolated_us:
            raise WorkloadError(f"the target {self} needs the isolated latency")
        return self.value * isolated_us

    def __str__(self) -> str:
        return f"{self.value:.10g}{'x' if self.milliseconds is None else ' ms'}"


def parse_qos(text: str) -> Qos:
    """Read "15" or "15ms" (milliseconds) or "3x" (times the isolated latency). Raises WorkloadError."""
    number = text.strip()
    try:
        if number.endswith("x"):
            return Qos(multiple=float(number.removesuffix("x")))
        return Qos(milliseconds=float(number.removesuffix("ms")))
    except ValueError as error:
        raise WorkloadError(f'expected milliseconds ("15") or a multiple of isolated ("3x"), got "{text}"') from error
