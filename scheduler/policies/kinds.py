"""Pieces of models that are bound by memory or by compute: what Layerweaver and AI-MT schedule, on a CPU.

The papers schedule single layers, on accelerators that take a layer from a queue. Here each piece is a dispatch of some
10 us, and layers may be as short. So a piece is a run of layers: it ends where the kind of layer changes once it is
300 us long, and at the next boundary whatever the kind once it is 2 ms long (times of one row on one core).
"""

from dataclasses import dataclass

from gangway.scheduler.model_profile import ModelProfile

SHORTEST_US = 300.0
LONGEST_US = 2000.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers [begin, end) of one row, with the times that memory and arithmetic of one core are busy with them."""

    begin: int
    end: int
    memory_us: float
    compute_us: float

    @property
    def memory_bound(self) -> bool:
        """Whether memory is busy for longer."""
        return self.memory_us > self.compute_us


class Pieces:
    """The piece that begins at a layer. Remembered, because each decision asks for those of all waiting queries."""

    def __init__(self) -> None:
        self._models: dict[int, tuple[ModelProfile, dict[int, Piece]]] = {}

    def piece(self, model: ModelProfile, begin: int, end: int | None = None) -> Piece:
        """Return the piece that begins at this layer; with `end` the layers up to there, whatever they are."""
        if end is not None:
            return _sum(model, begin, end)
        known = self._models.get(model.model_id)
        if known is None or known[0] is not model:
            known = self._models[model.model_id] = (model, {})
        if begin not in known[1]:
            known[1][begin] = _sum(model, begin, _end(model, begin))
        return known[1][begin]


def layer_times_us(model: ModelProfile, layer: int) -> tuple[float, float]:
    """Return Layerweaver+'s m and c of a layer; without them a layer is all compute."""
    if not model.memory_us or not model.compute_us:
        return 0.0, model.layer_us(layer, 1)
    return model.memory_us[layer], model.compute_us[layer]


def _end(model: ModelProfile, begin: int) -> int:
    if model.indivisible:
        return model.layers
    time_us = piece_memory_us = piece_compute_us = 0.0
    for layer in range(begin, model.layers):
        memory_us, compute_us = layer_times_us(model, layer)
        changes = (memory_us > compute_us) != (piece_memory_us > piece_compute_us)
        if time_us >= LONGEST_US or (changes and time_us >= SHORTEST_US):
            return layer
        time_us += max(memory_us, compute_us)
        piece_memory_us += memory_us
        piece_compute_us += compute_us
    return model.layers


def _sum(model: ModelProfile, begin: int, end: int) -> Piece:
    times = [layer_times_us(model, layer) for layer in range(begin, end)]
    return Piece(begin, end, sum(time[0] for time in times), sum(time[1] for time in times))
