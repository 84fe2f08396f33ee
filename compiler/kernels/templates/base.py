"""What all templates share: errors, plans, images in memory."""

from collections.abc import Iterable
from dataclasses import dataclass

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import KernelPlan, KernelSpec

FLOAT_BYTES = 4
TASK_ELEMENTS = 8192  # of a task that does little to each number


class UnsupportedSpecError(ValueError):
    """No template computes this spec; the message says what is missing."""


@dataclass(frozen=True)
class Image:
    """One row's activation in memory: planes of `lanes` interleaved channels (1: planar), each with a zero halo."""

    channels: int
    height: int
    width: int
    halo: int
    lanes: int

    @property
    def blocks(self) -> int:
        """Number of planes."""
        return -(-self.channels // self.lanes)

    @property
    def row(self) -> int:
        """Elements from one line of pixels to the next."""
        return (self.width + 2 * self.halo) * self.lanes

    @property
    def plane(self) -> int:
        """Elements from one plane to the next."""
        return (self.height + 2 * self.halo) * self.row

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return self.blocks * self.plane

    @property
    def origin(self) -> int:
        """Element at which pixel (0, 0) of the first plane begins."""
        return self.halo * (self.row + self.lanes)


def registers(target: TargetSpec) -> int:
    """Number of vector registers."""
    return 32 if target.name == "avx512" else 16


def make_plan(
    spec: KernelSpec, knobs: dict[str, int | str], tasks: int, description: str, blocking_bytes: int, accumulators: int
) -> KernelPlan:
    """A plan with its knobs in canonical order."""
    ordered = tuple(sorted(knobs.items()))
    return KernelPlan(spec, ordered, tasks, description, blocking_bytes, tasks * accumulators)


def knob(plan: KernelPlan, name: str) -> int:
    """The value of an integer knob."""
    return int(dict(plan.knobs)[name])


def balanced(total: int, limit: int) -> tuple[tuple[int, int, int], ...]:
    """`total` in equal parts of at most `limit`: up to two runs of (start, number of parts, size of each)."""
    parts = -(-total // limit)
    size, larger = divmod(total, parts)
    runs = [(0, larger, size + 1), (larger * (size + 1), parts - larger, size)]
    return tuple(run for run in runs if run[1])


def balanced_sizes(totals: Iterable[int], limit: int) -> list[int]:
    """Every size of a part when each total is cut into as few equal parts of at most `limit` as possible."""
    return sorted({size for total in totals for _, _, size in balanced(total, limit)})
