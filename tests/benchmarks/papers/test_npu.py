"""The accelerator's times and engines against cases worked out by hand; layerweaver_plus keeps what others break."""

import csv
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.papers import layerweaver_fig4, layerweaver_fig5
from benchmarks.papers.figures import FigureRequest
from benchmarks.papers.npu_models import Npu, NpuModel, npu_model
from benchmarks.papers.npu_study import LANGUAGE, VISION, Pair, Study, satisfied
from benchmarks.papers.simulated_npu import SCHEDULERS, Engines, Job, Tenant, serve
from gangway.base.console import Console
from gangway.workload.arrivals import Arrivals

SMALL = Npu(bytes_per_us=1.0, buffer_bytes=100.0)  # a byte takes a microsecond, the buffer holds 100 us


def model(name: str, *layers_us: tuple[float, float]) -> NpuModel:
    """Layers with these m and c; on SMALL m is also the number of bytes."""
    memory_us = tuple(layer[0] for layer in layers_us)
    return NpuModel(name, memory_us, memory_us, tuple(layer[1] for layer in layers_us))


def job(*layers_us: tuple[float, float]) -> Job:
    one = model("m", *layers_us)
    return Job(0, [0], 0.0, 1e9, one.memory_us, one.compute_us, one.remaining_us(1), one.weight_bytes)


def trace(*requests: tuple[float, int]) -> Arrivals:
    return Arrivals(np.array([one[0] for one in requests]), np.array([one[1] for one in requests]))


def test_times_on_the_array() -> None:
    npu = Npu()
    assert npu.cycles_per_us == pytest.approx(976.5625)
    resnet = npu_model("resnet50", npu)
    assert resnet.layers == 54
    # conv1: 3 x 64 channels fill one pass, 49 taps, 112 x 112 positions; 64 x 3 x 49 weights of two bytes
    assert resnet.compute_us[0] == pytest.approx(49 * 112 * 112 / 976.5625)
    assert resnet.weight_bytes[0] == 64 * 3 * 49 * 2
    assert sum(resnet.weight_bytes) == pytest.approx(2 * 25.5e6, rel=0.01)
    bert = npu_model("bert_base", npu)
    assert bert.layers == 73, "products of activations belong to the layer before"
    # fc1 of a block: 768 x 3072 weights in 3 x 12 passes, 128 tokens
    assert max(bert.compute_us) == pytest.approx(36 * 128 / 976.5625)
    assert max(bert.memory_us) == pytest.approx(768 * 3072 * 2 / 100_000)
    depthwise_us = npu_model("mobilenetv2", npu).compute_us[1]
    assert depthwise_us == pytest.approx(9 * 112 * 112 / 976.5625)
    with pytest.raises(ValueError, match="more than the buffer"):
        npu_model("bert_large", Npu(buffer_bytes=1e6))


def test_vision_is_bound_by_compute_and_language_by_memory_as_in_the_paper() -> None:
    assert not any(npu_model(name, Npu()).memory_bound for name in VISION)
    assert all(npu_model(name, Npu()).memory_bound for name in LANGUAGE)


def test_remaining_time_is_the_sum_of_the_longer_ones() -> None:
    one = model("m", (10.0, 4.0), (1.0, 5.0), (2.0, 3.0))
    assert one.remaining_us(1) == (18.0, 8.0, 3.0)
    assert one.remaining_us(3) == (36.0, 24.0, 9.0)


def test_engines_overlap_fetch_and_compute() -> None:
    engines, work = Engines(SMALL), job((10.0, 30.0), (20.0, 5.0), (40.0, 5.0))
    assert engines.plan(work, 0.0) == (10.0, 40.0, 10.0)  # compute waits for the first fetch
    assert engines.take(work, 0.0) == 40.0
    assert engines.next_choice_us() == 10.0
    assert engines.take(work, 10.0) == 45.0  # fetched at 30, beside the first one's compute
    assert engines.plan(work, 30.0) == (70.0, 75.0, 25.0)  # compute is idle from 45 to 70
    assert engines.take(work, 30.0) == 75.0


def test_a_full_buffer_makes_the_memory_wait() -> None:
    engines = Engines(SMALL)
    engines.take(job((60.0, 100.0)), 0.0)  # in the buffer until 160
    engines.take(job((30.0, 50.0)), 60.0)  # until 210
    fetched_us, end_us, idle_us = engines.plan(job((20.0, 1.0)), 110.0)
    assert (fetched_us, end_us) == (180.0, 211.0)
    assert idle_us == 50.0  # from 110 to 160; afterwards compute is 31 us ahead, less than a full buffer


def test_nothing_is_chosen_while_compute_is_a_buffer_ahead() -> None:
    engines = Engines(SMALL)
    engines.take(job((10.0, 250.0)), 0.0)
    assert engines.next_choice_us() == 160.0  # 260 - 100
    long_work = job((10.0, 500.0))
    # Later by 100 us than if it were run when compute is idle: 150 of backlog, of which 10 for the fetch, less 90.
    assert engines.plan(long_work, 160.0)[2] == pytest.approx(760.0 - 100.0 - 170.0 - 390.0)


def test_alone_and_woven() -> None:
    """A memory-bound and a compute-bound request that arrive together: 2 x 110 us one after the other."""
    tenants = [Tenant(model("memory", *[(10.0, 1.0)] * 10), 1e6), Tenant(model("compute", *[(1.0, 10.0)] * 10), 1e6)]
    arrivals = trace((0.0, 0), (0.0, 1))
    alone = serve("baseline", tenants, arrivals, SMALL)
    assert alone.tolist() == pytest.approx([101.0, 202.0])
    for scheduler in ("layerweaver", "layerweaver_plus"):
        woven = serve(scheduler, tenants, arrivals, SMALL)
        assert woven.max() == pytest.approx(111.0, abs=10.0)


def test_fig_3_only_layerweaver_plus_meets_all_deadlines() -> None:
    """A and C are long and relaxed, B arrives in between with an imminent deadline."""
    tenants = [Tenant(model("relaxed", *[(20.0, 2.0)] * 10), 900.0), Tenant(model("urgent", *[(5.0, 25.0)] * 4), 200.0)]
    arrivals = trace((0.0, 0), (1.0, 0), (2.0, 0), (3.0, 1))
    targets_us = np.array([tenants[index].qos_us for index in arrivals.models])
    late = {name: int((serve(name, tenants, arrivals, SMALL) > targets_us).sum()) for name in SCHEDULERS}
    assert late["baseline"] == 1
    assert late["layerweaver_plus"] == 0


def test_requests_of_a_model_become_batches() -> None:
    tenants = [Tenant(model("m", (10.0, 4.0)), 1e6)]
    arrivals = trace((0.0, 0), (1.0, 0), (2.0, 0), (3.0, 0))
    for scheduler in SCHEDULERS:
        # Alone: 14 us. Meanwhile three arrive: one fetch, three computations.
        latency_us = serve(scheduler, tenants, arrivals, SMALL, most=8)
        assert latency_us[0] == 14.0
        assert len(set((arrivals.times_us + latency_us)[1:].tolist())) == 1


def test_giving_up() -> None:
    tenants = [Tenant(model("m", (10.0, 4.0)), 20.0)]
    latency_us = serve("layerweaver_plus", tenants, trace(*[(0.0, 0)] * 50), SMALL, give_up=3)
    # A fetch each: the first one ends at 14, the second one at 24, which is late.
    assert latency_us[:5].tolist() == [14.0, 24.0, 34.0, 44.0, np.inf]


def test_the_order_of_the_paper() -> None:
    """One point of Fig. 4, and a rate that only layerweaver_plus sustains."""
    study = Study(queries=400, seed=2)
    pair = Pair("resnet50", "bert_base", 1.0)
    rates = study.rates_per_s(pair)
    assert rates["layerweaver_plus"] > max(rates["baseline"], rates["layerweaver"])
    targets_us = [tenant.qos_us for tenant in pair.tenants(study.npu)]
    in_time = {
        scheduler: satisfied(*study.latencies(scheduler, pair, rates["layerweaver_plus"]), targets_us)
        for scheduler in SCHEDULERS
    }
    assert in_time["layerweaver_plus"] >= 0.99 > max(in_time["layerweaver"], in_time["baseline"])


@pytest.mark.parametrize("figure", [layerweaver_fig4, layerweaver_fig5])
def test_figures_are_drawn(figure: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerweaver_fig4, "RATIOS", (1.0,))
    monkeypatch.setattr(layerweaver_fig4, "VISION", VISION[-1:])
    monkeypatch.setattr(layerweaver_fig4, "LANGUAGE", LANGUAGE[:1])
    one = layerweaver_fig5.Setting("a", Pair("resnet50", "bert_base", 0.25), 1000.0)
    monkeypatch.setattr(layerweaver_fig5, "_settings", lambda study: [one])
    figure.draw(FigureRequest(tmp_path, 50, 1, Console(quiet=True)))
    name = figure.__name__.rpartition(".")[2]
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["scheduler"] for row in rows} == set(SCHEDULERS)
    if figure is layerweaver_fig4:
        assert {row["scheduler"]: row["over_baseline"] for row in rows}["baseline"] == "1.0000"
        assert "1.492" in (tmp_path / f"{name}_summary.csv").read_text()
