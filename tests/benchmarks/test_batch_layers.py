"""Where the time of a batch goes: the parts that show it, on a model that takes next to none."""

import pytest

from benchmarks.kernels.batch_layers import WAYS, by_operator, largest_differences, layer_rows, measure, total_row
from gangway.artifact.reader import read_manifest
from gangway.executor.launch import available_cores


def test_layers_add_up_in_every_way(compiled_zoo) -> None:
    cores = available_cores()[:2]
    folder = compiled_zoo.artifact("mlp")
    (contest,) = measure(folder, [2 * len(cores)], 2, cores)
    layers = read_manifest(folder).layers
    assert contest.rows == 2 * len(cores)
    assert all(len(times) == len(layers) for way in WAYS for times in contest.layers_us[way])
    assert total_row(contest)["row ms"] == contest.total_ms("row") > 0
    groups = by_operator(layers)
    assert sorted(index for _, indices in groups for index in indices) == list(range(len(layers)))
    rows = layer_rows(contest, groups, peak_flops_per_us=1e5)
    assert sum(row["n"] for row in rows) == len(layers)
    total_ms = sum(contest.layer_ms("fat", layer) for layer in range(len(layers)))
    assert sum(row["fat ms"] for row in rows) == pytest.approx(total_ms)
    differences = [abs(row["thin - fat"]) for row in layer_rows(contest, largest_differences(contest, 3), 1e5)]
    assert differences == sorted(differences, reverse=True)
