"""`gangway serve` with lengths that change from request to request: one program computes all of them, native."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from gangway.server.control.repository.loaded import SPAN_AFTER, SPAN_SIZES
from testing.decoders import SMALL, decoder_feeds, encoder_feeds, save_decoder, save_encoder
from tests.helpers import onnx_text
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.long

FIRST = 2 * SPAN_SIZES + 1  # of a span
LAST = SMALL.positions - 1  # beyond, there are no positions


class Checked(Served):
    """A server with models and onnxruntime's sessions of them."""

    @cached_property
    def sessions(self) -> dict[str, Any]:
        return {path.parts[-3]: onnxruntime.InferenceSession(path) for path in self.repository.glob("*/1/model.onnx")}

    def check(self, name: str, feeds: dict[str, Any]) -> None:
        answers = self.ask(name, feeds)
        for key, expected in zip(answers, self.sessions[name].run(list(answers), feeds), strict=True):
            np.testing.assert_allclose(answers[key], expected, rtol=1e-4, atol=1e-4, err_msg=f"{name} {key}")


# A convolution over a sequence of any length.
FILTER = "(float[N, 4, T] x) => (float[N, 4, T] y) { y = Conv<pads=[1, 1]>(x, w) }"


def save_filter(path: Path) -> Path:
    weights = np.random.default_rng(0).standard_normal((4, 4, 3), np.float32)
    return onnx_text.save(path.parents[2], path.parts[-3], FILTER, w=weights)


@contextmanager
def saved(folder: Path, models: Mapping[str, Callable[[Path], Path]], *flags: str) -> Iterator[Checked]:
    for name, save in models.items():
        save(folder / name / "1" / "model.onnx")
    with serving(folder, *flags, kind=Checked) as served:
        yield served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    with saved(tmp_path_factory.mktemp("served"), {"decoder": save_decoder, "encoder": save_encoder}) as served:
        yield served


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_a_new_length_costs_no_compilation(served: Checked, name: str) -> None:
    make, symbol = (decoder_feeds, "past") if name == "decoder" else (encoder_feeds, "length")
    for length in range(FIRST, FIRST + SPAN_AFTER):
        served.check(name, make(length, 1))
        served.wait_for(f"{symbol}={length}: ready, compiled for these sizes")
    served.check(name, make(FIRST + SPAN_AFTER, 1))
    served.wait_for(f"{symbol}={FIRST} to {FIRST + SPAN_SIZES - 1}: ready")
    compiled = len(served.lines("compiled, "))
    for length in np.random.default_rng(0).permutation(range(FIRST, LAST + 1)).tolist():
        served.check(name, make(length, 1 + length % 3))
    assert len(served.lines("compiled, ")) == compiled


def test_a_decoder_begins_without_past(served: Checked) -> None:
    served.check("decoder", decoder_feeds(0, 1))
    served.wait_for("past=0: ready, compiled for these sizes")
    for rows in (1, 3):
        served.check("decoder", decoder_feeds(0, rows))


def test_lengths_are_compiled_before_requests_have_them(tmp_path: Path) -> None:
    models = {"encoder": save_encoder, "filter": save_filter}
    with saved(tmp_path, models, f"--compile-ahead={SPAN_SIZES}") as ahead:
        ahead.wait_for("filter, version 1, T=1 to 64: compiled one by one: each size of a convolution needs kernels")
        ahead.wait_for("length=1 to 64: ready")
        ahead.wait_for("length=1: ready")  # whose layers are others
        compiled = len(ahead.lines("compiled, "))
        for length in (1, 2, SPAN_SIZES - 1, SPAN_SIZES):
            ahead.check("encoder", encoder_feeds(length, 1 + length % 3))
        assert len(ahead.lines("compiled, ")) == compiled
