"""The accelerator of Layerweaver+ (IEICE Transactions E105-D, 2022, section 3.1), and how long layers take on it.

The paper gives 128 TOP/s, 100 GB/s and a buffer of 50 MB, and takes times from MAESTRO, a model of arrays. It does not
say how the array is organised or how wide numbers are. Our reading, fixed before any throughput was computed:

- 256 x 256 multipliers, input channels along one side, output channels along the other, at the clock that makes it
  128 TOP/s: MAESTRO's KC-partitioned mapping, NVDLA's. A layer takes `groups x ceil(inputs / 256) x
  ceil(outputs / 256) x taps x positions` cycles; a depthwise one fills one side of the array only. With a perfect array
  all of the models would be bound by memory; with this one the CNNs are bound by compute and the transformers by
  memory, as in the paper.
- Two bytes a number: the rates that the paper quotes for TPUv3 and TPUv4i are those of 16-bit numbers.
- Memory time is that of the weights; activations stay in the buffer, beside the 50 MB. Pooling, normalisation and
  softmax take no time (vector units work beside the array). Products of two activations (attention) need no fetch, and
  belong to the layer before.
"""

import csv
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil
from pathlib import Path

TABLE = Path(__file__).parent / "npu_layers.csv"


@dataclass(frozen=True)
class Npu:
    """An array, a memory and a buffer for prefetched weights."""

    tera_ops: float = 128.0
    bytes_per_us: float = 100_000.0
    buffer_bytes: float = 50e6
    side: int = 256
    number_bytes: int = 2

    @property
    def cycles_per_us(self) -> float:
        """Clock; every multiplier does two operations a cycle."""
        return self.tera_ops * 1e6 / (2 * self.side**2)

    @property
    def buffer_us(self) -> float:
        """How long the memory takes to fill the buffer."""
        return self.buffer_bytes / self.bytes_per_us


@dataclass(frozen=True)
class NpuModel:
    """L layers, each one fetch of weights and what is computed until the next one. Times are microseconds."""

    name: str
    weight_bytes: tuple[float, ...]  # [L]
    memory_us: tuple[float, ...]  # [L]
    compute_us: tuple[float, ...]  # [L], of one request; a batch takes as many times as long

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.memory_us)

    @cached_property
    def memory_bound(self) -> bool:
        """Whether a single request is."""
        return sum(self.memory_us) > sum(self.compute_us)

    def remaining_us(self, batch: int) -> tuple[float, ...]:
        """Return Layerweaver+'s standalone time from each layer to the end [L]: the sum of max(m, c)."""
        rest = 0.0
        remaining = []
        for memory_us, compute_us in zip(reversed(self.memory_us), reversed(self.compute_us), strict=True):
            rest += max(memory_us, batch * compute_us)
            remaining.append(rest)
        return tuple(reversed(remaining))


def npu_model(name: str, npu: Npu) -> NpuModel:
    """Return one of the table's models on this accelerator.

    Raises KeyError if the table lacks it, ValueError if one of its layers is larger than the buffer.
    """
    weights: list[float] = []
    compute: list[float] = []
    for row in _rows()[name]:
        groups, inputs, outputs, taps, positions, weighted = row
        cycles = taps * positions * _passes(groups, inputs, outputs, npu.side)
        if weighted or not weights:
            weights.append(groups * inputs * outputs * taps * npu.number_bytes if weighted else 0.0)
            compute.append(0.0)
        compute[-1] += cycles / npu.cycles_per_us
    if max(weights) > npu.buffer_bytes:
        raise ValueError(f"a layer of {name} has {max(weights) / 1e6:.1f} MB of weights, more than the buffer")
    return NpuModel(name, tuple(weights), tuple(size / npu.bytes_per_us for size in weights), tuple(compute))


def _passes(groups: int, inputs: int, outputs: int, side: int) -> int:
    """Return how often the array is filled for one position and tap."""
    if inputs == outputs == 1:
        return ceil(groups / side)
    return groups * ceil(inputs / side) * ceil(outputs / side)


@cache
def _rows() -> dict[str, list[tuple[int, ...]]]:
    """Return the products of each model: groups, inputs, outputs, taps, positions, weighted."""
    rows: dict[str, list[tuple[int, ...]]] = {}
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = (row[key] for key in ("groups", "inputs", "outputs", "taps", "positions", "weighted"))
            rows.setdefault(row["model"], []).append(tuple(map(int, numbers)))
    return rows
