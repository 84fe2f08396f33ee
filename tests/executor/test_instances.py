"""One program for several sizes, on workers: whatever sizes come one after the other, answers are onnxruntime's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from gangway.artifact.datatypes import DTYPES
from gangway.artifact.format import Manifest
from gangway.artifact.instances import SHIFT, SizeSpan
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.messages import LeftReason
from gangway.executor.slots import SlotRequest, SlotStatus
from gangway.measure.model_runner import LocalExecutor
from testing.decoders import (
    FLOAT,
    SMALL,
    Builder,
    decoder_feeds,
    encoder_feeds,
    save_decoder,
    save_encoder,
    save_translator,
    translator_feeds,
)
from tests.conftest import CompileKept
from tests.executor.conftest import two_workers
from tests.helpers.sampled import sampled

FIRST, LAST = 13, 18
MODEL_ID = 3
WAIT_US = 10_000_000
STEP_BYTES = 1 << 14


@dataclass
class Loaded:
    """A model on workers, all of whose arenas are the same memory."""

    executor: LocalExecutor
    manifest: Manifest
    session: Any
    feeds: Callable[[int, int], dict[str, Any]]

    @property
    def numbers(self) -> dict[int, int]:
        """The instance of each size."""
        assert self.manifest.instances
        return {instance.sizes[-1]: number for number, instance in enumerate(self.manifest.instances.each)}

    def answer(self, size: int, rows: int, workers: list[int]) -> dict[str, Any]:
        feeds, number = self.feeds(size, rows), self.numbers[size]
        assert self.manifest.instances
        instance = self.manifest.instances.each[number]
        inputs, outputs, end = [], [], 1 << 16
        for tensor in self.manifest.inputs:
            content = np.ascontiguousarray(feeds[tensor.name]).tobytes()
            self.executor.io.view[end : end + len(content)] = content
            inputs.append(end)
            end += -(-len(content) // STEP_BYTES) * STEP_BYTES
        for _ in self.manifest.outputs:
            outputs.append(end)
            end += 8 * STEP_BYTES
        request = SlotRequest(MODEL_ID, rows, tuple(inputs), tuple(outputs), join_key=number << SHIFT)
        slot, generation = self.executor.begin(request)
        arena, layers = self.manifest.arena_bytes, len(self.manifest.layers)
        member = Member(0, slot, generation, rows=rows)
        spec = LeaseSpec(MODEL_ID, (member,), 0, arena, 0, layers, wanted=len(workers))
        self.executor.start(0, spec, workers)
        assert self.executor.slots.wait(slot, WAIT_US)
        assert self.executor.slots.outcome(slot).status is SlotStatus.OK
        self.executor.left(workers)
        self.executor.slots.release(slot)
        answers = {}
        for tensor, shape, begin in zip(self.manifest.outputs, instance.outputs, outputs, strict=True):
            whole = (rows, *shape[1:])
            dtype = DTYPES[tensor.datatype]
            size_bytes = int(np.prod(whole)) * dtype.itemsize
            content = bytes(self.executor.io.view[begin : begin + size_bytes])
            answers[tensor.name] = np.frombuffer(content, dtype).reshape(whole)
        return answers

    def check(self, size: int, rows: int, workers: list[int]) -> None:
        answers = self.answer(size, rows, workers)
        expected = self.session.run(list(answers), self.feeds(size, rows))
        for (name, answer), other in zip(answers.items(), expected, strict=True):
            np.testing.assert_allclose(answer, other, rtol=1e-4, atol=1e-4, err_msg=f"{name} of {size} x {rows}")


CHANNELS, HIDDEN = 6, 20
CELLS = {"LSTM": (4, "bidirectional"), "GRU": (3, "reverse"), "RNN": (1, "forward")}  # gates, direction


def save_recurrent(path: Path) -> Path:
    """An LSTM in both directions, a GRU from the end, and an RNN, one behind the other."""
    b, x, width = Builder(SMALL), "x", CHANNELS
    x = b.node("Transpose", x, perm=[1, 0, 2])
    for operator, (gates, direction) in CELLS.items():
        count = 2 if direction == "bidirectional" else 1
        shapes = (count, gates * HIDDEN, width), (count, gates * HIDDEN, HIDDEN), (count, 2 * gates * HIDDEN)
        weights = [b.constant(0.3 * b.random.standard_normal(shape), np.float32) for shape in shapes]
        y = b.node(operator, x, *weights, hidden_size=HIDDEN, direction=direction)
        joined = b.node("Transpose", y, perm=[0, 2, 1, 3])
        width = count * HIDDEN
        x = b.node("Reshape", joined, b.constant([0, 0, width]))
    b.node("Transpose", x, output="y", perm=[1, 0, 2])
    return b.save(path, {"x": (FLOAT, ["batch", "length", CHANNELS])}, {"y": ["batch", "length", width]})


def recurrent_feeds(length: int, rows: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(length).standard_normal((rows, length, CHANNELS), np.float32)}


TRANSLATOR = replace(SMALL, source=9)
# How each model is saved, its inputs, the symbol of the span, sizes of others.
MODELS: dict[str, tuple[Any, Any, str, dict[str, int]]] = {
    "decoder": (save_decoder, decoder_feeds, "past", {"sequence": 1}),
    "encoder": (save_encoder, encoder_feeds, "length", {}),
    "recurrent": (save_recurrent, recurrent_feeds, "length", {}),
    "translator": (
        partial(save_translator, sizes=TRANSLATOR),
        partial(translator_feeds, sizes=TRANSLATOR),
        "past",
        {"sequence": 1, "source": TRANSLATOR.source},
    ),
}


@pytest.fixture(scope="module", params=sampled(MODELS, ["decoder"]))
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept
) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("model")
    save, feeds, symbol, dimensions = MODELS[request.param]
    path: Path = save(folder / "model.onnx")
    span = SizeSpan(symbol, FIRST, LAST)
    cache_dir = tmp_path_factory.mktemp("cache")
    compiled = compile_kept(path, "spanned", cache_dir, dimensions=dimensions, span=span)
    with two_workers(cache_dir) as executor:
        executor.load(MODEL_ID, compiled.manifest.key)
        executor.arena.allocate(0, 1 << 24)
        executor.io.allocate(0, 1 << 24)
        yield Loaded(executor, compiled.manifest, onnxruntime.InferenceSession(path), feeds)


def test_one_artifact_has_all_sizes(loaded: Loaded) -> None:
    assert sorted(loaded.numbers) == list(range(FIRST, LAST + 1))
    assert loaded.numbers[LAST] == 0
    assert not loaded.manifest.difference


def test_all_lengths_share_kernels_of_recurrent_layers(loaded: Loaded) -> None:
    """One for a row and one for several rows; each takes longer to compile than all else of a length."""
    assert loaded.manifest.instances
    layers = sum(layer.operator in CELLS for layer in loaded.manifest.layers)
    recurrent = [symbol for symbol in loaded.manifest.instances.kernels if symbol.startswith("recurrent")]
    assert len(recurrent) <= 2 * layers


def test_sizes_take_turns_in_one_arena(loaded: Loaded) -> None:
    random = np.random.default_rng(0)
    for _ in range(2):
        for size in random.permutation(range(FIRST, LAST + 1)).tolist():
            loaded.check(size, int(random.choice([1, 3])), [[0], [0, 1]][size % 2])


def test_an_unknown_instance_is_not_computed(loaded: Loaded) -> None:
    assert loaded.manifest.instances
    places = tuple(1 << 16 for _ in loaded.manifest.inputs), tuple(1 << 17 for _ in loaded.manifest.outputs)
    number = len(loaded.manifest.instances.each)
    slot, generation = loaded.executor.begin(SlotRequest(MODEL_ID, 1, *places, join_key=number << SHIFT))
    layers = len(loaded.manifest.layers)
    spec = LeaseSpec(
        MODEL_ID, (Member(0, slot, generation, rows=1),), 0, loaded.manifest.arena_bytes, 0, layers, wanted=1
    )
    loaded.executor.start(0, spec, [0])
    (left,) = loaded.executor.left([0])
    assert left.reason is LeftReason.INVALID
    loaded.executor.slots.finish(slot, generation, SlotStatus.INTERNAL)
    loaded.executor.slots.release(slot)
