"""From batches on the measured cores to batches on N: the model of `docs/simulator.md`, fixed before any result.

A gang of c ranks of a machine of N cores takes for b rows

    T(c, b) = (inside + outside - 1) shared(c, b) + outside serial(b)
    shared(c, b) = ideal(c, b) (1 - serial(b) / ideal(1, b))

- `ideal`: each layer's time on one core, as its tasks let c ranks share it, each rank with the turns that it costs. On
  one core b rows take `fixed + b row`: the closest line through all batches, neither part negative;
- `inside`: by how much the other ranks of a gang slow each one down, `outside`: the other gangs. 1 if there are none;
  if they have all other cores, as measured; in between by the share of the other cores that they have;
- `serial`: Amdahl's part, `start + share x ideal(1, b)`: two numbers through all batches, not one for each layer and
  batch. Of one time on two cores everything that was noise would become a serial part, never the opposite (times
  cannot be shorter than ideal ones), and on 16 cores it would weigh eight times as much.

The serial part comes from gangs of all measured cores beside gangs of one, with as many rows, that have all those cores
at the same time: so what the machine's cores do to each other, and what others did to them, is in both.

Single times of batches are not kept: where the next larger batch was measured in a worse moment, a split would seem to
gain by it. A few numbers through all of them are what is measured.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gangway.simulator.measured import MeasuredModel

Floats = NDArray[np.float64]

TURN_US = 0.2  # benchmarks.gang on a quiet machine: two ranks 0.17 to 0.22 us
MOST_ROWS = 1024  # batches are predicted up to here


@dataclass(frozen=True)
class Losses:
    """What gangs lose. `residual`: of the measured times on all cores, relative, root mean square over the batches.

    `uncertain`: standard error of `share`, the batches taken as samples.
    """

    crowding: float  # a gang of one core takes so many times as long while every other core does the same,
    inside: float  # and the rank of a gang of all cores, which share what they read
    start_us: float
    share: float
    residual: float = 0.0
    uncertain: float = 0.0

    def serial_us(self, alone_us: Floats) -> Floats:
        """Return the serial part of what takes so long on one core."""
        return np.minimum(self.start_us + self.share * alone_us, alone_us)


@dataclass(frozen=True)
class RowTimes:
    """The whole model: `alone_us`, `together_us` [N, B], on c cores at [c - 1], `batches[j]` rows at [j].

    `together_us`: while gangs of so many cores do the same on all the others.
    """

    batches: tuple[int, ...]
    alone_us: Floats
    together_us: Floats


def scale_rows(model: MeasuredModel, cores: int, memory_share: float = 1.0, lost: Losses | None = None) -> RowTimes:
    """Return the times of batches on 1 to `cores` cores, alone and among gangs like it.

    `memory_share`: bandwidth per core, as a part of what the measured machine has per core. `lost`: in place of what
    was measured, to see what hangs on it.
    """
    batches = tuple(1 << power for power in range(MOST_ROWS.bit_length()))
    alone_us = _one_core_us(model, batches)
    ideal_us = _ideal_us(model, batches, alone_us, cores)
    total_us, lost = ideal_us[0], lost or losses(model)
    serial_us = lost.serial_us(total_us)
    shared_us = ideal_us * (1 - serial_us / total_us)
    counts = np.arange(1, cores + 1)[:, np.newaxis]
    inside = 1 + (lost.inside - 1) * (counts - 1) / max(1, cores - 1)
    outside = 1 + (lost.crowding - 1) * (cores - counts) / max(1, cores - 1)
    bytes_us = np.minimum(np.array(model.memory_us)[:, np.newaxis] * batches, alone_us).sum(axis=0) / memory_share
    alone = np.maximum(inside * shared_us + serial_us, bytes_us / cores)
    together = np.maximum((inside + outside - 1) * shared_us + outside * serial_us, bytes_us / counts)
    alone = np.minimum.accumulate(alone)  # ranks that do not pay take no part
    return RowTimes(batches, alone, np.maximum(np.minimum.accumulate(together), alone))


def losses(model: MeasuredModel) -> Losses:
    """Return what the gang of all measured cores loses, by least squares of relative errors over all batches.

    Neither part of the serial time is negative. If gangs of all cores do more than gangs of one, nothing of them is
    serial: their ranks disturb each other less.
    """
    alone_us, beside_us = np.array(model.isolated_us[0]), np.array(model.together_us[0])
    crowding = max(1.0, float(np.median(beside_us / alone_us)))
    ideal_us = _ideal_us(model, model.batches, _one_core_us(model, model.batches), model.cores[-1])
    parallel = ideal_us[-1] / ideal_us[0]
    rest = 1 - parallel * beside_us / alone_us
    if rest.min() <= 0:  # a core takes no share of the others' work: nothing can be told apart
        return Losses(crowding, crowding, 0.0, 0.0)
    gang_us = np.array(model.isolated_us[-1])
    serial = (gang_us - parallel * beside_us) / rest / alone_us
    start_us, share = _fit(1 / alone_us, serial)
    within = np.clip(np.median(gang_us / (parallel * alone_us)), 1, crowding) if not start_us + share else crowding
    predicted_us = parallel * alone_us * (within if not start_us + share else beside_us / alone_us)
    predicted_us = predicted_us + (start_us + share * alone_us) * rest
    residual = float(np.sqrt(np.mean((predicted_us / gang_us - 1) ** 2)))
    uncertain = float(serial.std() / np.sqrt(max(1, len(serial) - 1)))
    return Losses(crowding, float(within), start_us, share, residual, uncertain)


def _fit(x: Floats, y: Floats) -> tuple[float, float]:
    """Return (a, b) of y = a x + b, the closest line of which neither is negative."""
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread if spread else 0.0
    constant = float(y.mean()) - slope * float(x.mean())
    if slope < 0:
        return 0.0, max(0.0, float(y.mean()))
    if constant < 0:
        return max(0.0, float(x @ y) / float(x @ x)), 0.0
    return slope, constant


def _one_core_us(model: MeasuredModel, batches: tuple[int, ...]) -> Floats:
    """Return the layers' times on one core [L, B]: a line for each."""
    measured = np.array(model.batches)
    lines = [_fit(1 / measured, np.array(layer[0]) / measured) for layer in model.batch_us]
    return np.array([[fixed_us + rows * row_us for rows in batches] for fixed_us, row_us in lines])


def _ideal_us(model: MeasuredModel, batches: tuple[int, ...], alone_us: Floats, cores: int) -> Floats:
    """Return what the layers would take on 1 to `cores` cores if nothing but their tasks and turns counted [C, B]."""
    tasks = np.array([[_tasks(model, layer, rows) for rows in batches] for layer in range(len(alone_us))])
    ranks = np.arange(1, cores + 1)[:, np.newaxis, np.newaxis]
    times_us = alone_us * np.ceil(tasks / ranks) / tasks + TURN_US * (ranks - 1)
    ideal: Floats = np.minimum.accumulate(times_us).sum(axis=1)
    return ideal


def _tasks(model: MeasuredModel, layer: int, rows: int) -> int:
    """Return into how many tasks the layer's version 0 cuts so many rows (`docs/artifact.md`)."""
    if rows > 1 and model.kernel_rows[layer]:
        return -(-rows // model.kernel_rows[layer]) * model.kernel_tasks[layer]
    return rows * model.tasks[layer][0]
