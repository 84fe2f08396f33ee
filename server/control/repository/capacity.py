"""What there is room for: the numbers, memory and rows of models, and what the scheduler is told of each."""

import heapq
import logging

from gangway.artifact.format import MAX_TASKS, WEIGHTS_FILE, Engine, Manifest, staging_bytes
from gangway.base.host_limits import memory_limit_bytes
from gangway.base.memory_budget import memory_budget
from gangway.base.numbers import INT32_MAX
from gangway.executor import _native
from gangway.executor.launch import MOST_THREADS, thread_counts
from gangway.executor.leases import lease_count
from gangway.scheduler.messages import LoadModel
from gangway.server.errors import ModelLoadError

_log = logging.getLogger(__name__)
_BYTES_PER_US = 40_000.0  # one core of a current server, from its caches
_LEAST_LAYER_US = 1.0


class ModelCapacity:
    """The numbers that are free, and the weights that workers map. `workers`: how many there are.

    `arenas_bytes`: of addresses for what models compute with. `models_bytes`: that all models may hold, before those
    become idle that were asked longest ago; 0: any number.
    """

    def __init__(self, workers: int, arenas_bytes: int, models_bytes: int = 0) -> None:
        self._workers = workers
        self._arenas_bytes = arenas_bytes
        self._models_bytes = models_bytes
        self._free_ids = list(range(_native.MAX_MODELS))
        self._mapped_bytes: dict[int, int] = {}  # of weights, by model

    def take_id(self) -> int:
        """Return a number that no model has. Raises ModelLoadError."""
        if not self._free_ids:
            raise ModelLoadError(f"{_native.MAX_MODELS} models are loaded, more are not possible")
        return heapq.heappop(self._free_ids)

    def give_back(self, model_id: int) -> None:
        """The number of a model may be another's."""
        heapq.heappush(self._free_ids, model_id)

    def spec(self, name: str, manifest: Manifest, rows: int, model_id: int | None = None) -> LoadModel:
        """Return what the scheduler is told of a model of its own; its number is new unless it is given."""
        return LoadModel(
            model_id=self.take_id() if model_id is None else model_id,
            name=name,
            key=manifest.key,
            layers=len(manifest.layers),
            max_ranks=_max_ranks(manifest),
            arena_bytes=manifest.arena_bytes + staging_bytes(manifest),
            max_rows=rows,
            indivisible=manifest.is_whole,
            yields=manifest.engine is Engine.PYTHON,
            long_layers=_long_layers(manifest),
            layer_us=_estimated_layer_us(manifest),
            layer_ranks=tuple(layer.max_ranks for layer in manifest.layers),
            pass_layers=manifest.pass_layers,
            pass_rows=manifest.pass_rows,
            splits=not (manifest.tail or manifest.is_whole),  # a request has one answer
            loaded_bytes=self._loaded_bytes(manifest),
            weights_key=manifest.files[WEIGHTS_FILE].checksum if manifest.engine is Engine.NATIVE else manifest.key,
        )

    def computable_rows(self, *manifests: Manifest | None) -> int:
        """Return how many rows all of these take at a time if the configuration does not say it.

        Their arenas take a share of the addresses for all arenas that leaves enough for others.
        """
        loaded = _native.MAX_MODELS - len(self._free_ids)
        share_bytes = self._arenas_bytes / (4 * (8 + loaded)) / lease_count(self._workers)
        arena_bytes = min(share_bytes, memory_limit_bytes() / 16)
        return min(_computable_rows(manifest, arena_bytes) for manifest in manifests if manifest is not None)

    def rows_of(self, name: str, manifest: Manifest, in_bf16: Manifest | None) -> int:
        """Return how many rows a model takes at a time. Raises ModelLoadError if memory cannot hold it and one row."""
        self.require_memory(name, manifest)
        return self.computable_rows(manifest, in_bf16)

    def map_weights(self, model_id: int, manifest: Manifest) -> None:
        """Workers map the weights of a model."""
        self._mapped_bytes[model_id] = manifest.weights_bytes

    def unmap_weights(self, model_id: int) -> None:
        """No worker does any more."""
        self._mapped_bytes.pop(model_id, None)

    def _sessions(self, threads: int) -> int:
        """Return how many sessions of onnxruntime all workers have of a file, for which so many threads are useful."""
        return sum(len(thread_counts(min(cores, threads))) for cores in range(1, self._workers + 1))

    def _loaded_bytes(self, manifest: Manifest) -> int:
        """Return what workers hold of a model while it is loaded: weights, and sessions of onnxruntime."""
        threads = MOST_THREADS
        if manifest.engine is Engine.NATIVE:
            threads = max((layer.max_ranks for layer in manifest.islands), default=1)
        return manifest.weights_bytes + self._sessions(threads) * manifest.session_bytes

    def require_memory(self, name: str, manifest: Manifest) -> None:
        """Raise ModelLoadError if memory cannot hold the model and one row of a request.

        The log names a model that is above the limit of all models.

        Pages of weights count, although the kernel could take them back: it would read them again for every request.
        """
        row_bytes = sum(tensor.row_bytes for tensor in (*manifest.inputs, *manifest.outputs))
        one_row_bytes = manifest.arena_bytes + staging_bytes(manifest) + 2 * row_bytes  # in a message, and as a tensor
        weights_bytes = self._loaded_bytes(manifest)
        budget = memory_budget()
        mapped_bytes = sum(self._mapped_bytes.values())
        if self._models_bytes:
            mapped_bytes = min(mapped_bytes, self._models_bytes)
        left_bytes = budget.room_bytes() - mapped_bytes
        if weights_bytes + one_row_bytes > left_bytes:
            raise ModelLoadError(
                f"the model needs {weights_bytes >> 20} MiB for weights and {one_row_bytes >> 20} MiB for each row,"
                f" but of {budget.limit} {max(0, left_bytes) >> 20} MiB are left"
            )
        if 0 < self._models_bytes < weights_bytes:
            _log.warning(
                "%s needs %.1f MiB for weights, more than the %.1f MiB of --models-memory-mib: while it is loaded,"
                " others are idle that have no requests",
                name,
                weights_bytes / (1 << 20),
                self._models_bytes / (1 << 20),
            )


def _long_layers(manifest: Manifest) -> tuple[int, ...]:
    """Return the layers that onnxruntime computes."""
    return tuple(number for number, layer in enumerate(manifest.layers) if manifest.is_whole or layer.onnx_file)


def _max_ranks(manifest: Manifest) -> int:
    """Return beyond how many cores no layer gets faster; a profile says more about onnxruntime."""
    if manifest.engine is Engine.PYTHON:
        return 1
    if manifest.engine is Engine.ONNXRUNTIME:
        return MOST_THREADS
    return max(layer.max_ranks for layer in manifest.layers)


def _computable_rows(manifest: Manifest, arena_bytes: float) -> int:
    """Return how many rows of a model can be computed at a time in an arena of this size."""
    if manifest.is_whole:
        return INT32_MAX
    versions = [version for layer in manifest.layers for version in layer.versions]
    tasks = max(kernel.tasks for version in versions for kernel in (version, version.batch) if kernel)
    row_bytes = manifest.arena_bytes + staging_bytes(manifest)
    return max(1, min(MAX_TASKS // tasks, int(arena_bytes / row_bytes) if row_bytes else MAX_TASKS))


def _estimated_layer_us(manifest: Manifest) -> tuple[float, ...]:
    """Return a guess, within a factor of two or three, for each layer of one row on one core."""
    return tuple(
        round(max(layer.row_ns / 1e3, layer.bytes / _BYTES_PER_US, _LEAST_LAYER_US), 1) for layer in manifest.layers
    )
