"""Which layers a batch computes pass by pass: some rows through all of them, then the next rows.

Layer by layer each reads its weights once for all rows, but what it writes has left the second level cache before the
next one reads it. Pass by pass it is the other way round. Convolutional networks begin with large images and small
weights and end the other way: so the first layers are computed pass by pass, up to where most bytes are saved. (Packrat
splits a batch for the same reason, but over instances.)
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from gangway.compiler.buffers import Step
from gangway.compiler.describe import activation_bytes, weight_bytes

_CACHE_BYTES = 1 << 20  # what rows may take of a core's second level cache, which has one or two megabytes


class Passes(NamedTuple):
    """The first `layers` layers are computed pass by pass, `rows` rows for each core; no layers: all rows at once."""

    layers: int
    rows: int


def choose_passes(steps: Sequence[Step]) -> Passes:
    """Return the passes of a model."""
    return passes_of([activation_bytes(step) for step in steps], [weight_bytes(step) for step in steps])


def passes_of(activations: Sequence[int], weights: Sequence[int]) -> Passes:
    """Return the passes for layers that move so many bytes of activations, and of weights, for one row."""
    saved = list(accumulate(here - there for here, there in zip(activations, weights, strict=True)))
    layers = 1 + max(range(len(saved)), key=lambda layer: saved[layer])
    if layers == 1 or saved[layers - 1] <= 0:
        return Passes(0, 1)
    return Passes(layers, max(1, _CACHE_BYTES // max(activations[:layers])))
