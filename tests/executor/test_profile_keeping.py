"""What counters tell about the machine rests on all models that were measured on it."""

from dataclasses import replace
from pathlib import Path

from gangway.artifact.counter_log import CounterLog, CounterSample
from gangway.artifact.profile import LayerProfile, Machine, Profile, read_profile
from gangway.artifact.proxy import proxy_path, read_proxy
from gangway.measure.profiler import LEAST_SAMPLES, keep_profile

MACHINE = Machine("0123456789ab", "a CPU", 2, "avx2", 1.0, 1.0)
PROFILE = Profile(
    key="0" * 64,
    model_name="model",
    machine=MACHINE,
    cores=(1,),
    batches=(1,),
    layers=(LayerProfile("layer", (((10.0,),),), 1.0, 1.0, (), ()),),
    isolated_us=((10.0,),),
    together_us=((10.0,),),
    interference=(),
    interference_cores=0,
    runs=(9,),
    scatter=0.02,
    seconds=1.0,
)


def measured(model: int, miss_rate: float, count: int = LEAST_SAMPLES, level: float = 1.0) -> Profile:
    """Half of the samples calm and without misses, half of them at a level and with misses."""
    pairs = [(0.0, 0.0), (miss_rate, level)] * (count // 2)
    samples = tuple(CounterSample(10.0, 10.0 * rate, reached) for rate, reached in pairs)
    return replace(PROFILE, key=f"{model:064x}", counters=CounterLog(("accesses", "misses"), samples))


def test_every_model_counts_and_the_last_measurement_of_it(tmp_path: Path) -> None:
    path, first = keep_profile(tmp_path, measured(1, 0.5))
    assert first is not None and (first.models, first.samples) == (1, 8)
    _, second = keep_profile(tmp_path, measured(2, 0.25))
    assert second is not None and (second.models, second.samples) == (2, 16)
    assert first.level(10.0, 2.5) < second.level(10.0, 2.5)
    _, again = keep_profile(tmp_path, measured(2, 0.5, count=10))
    assert again is not None and (again.models, again.samples) == (2, 18)
    assert read_proxy(proxy_path(path.parent, MACHINE.machine_id)) == again
    assert read_profile(path) == measured(1, 0.5)


def test_calm_models_leave_the_line_that_is_there(tmp_path: Path) -> None:
    path, first = keep_profile(tmp_path, measured(1, 0.5))
    assert keep_profile(tmp_path, measured(1, 0.5, level=0.01)).proxy is None
    assert read_proxy(proxy_path(path.parent, MACHINE.machine_id)) == first


def test_what_counts_nothing_learns_nothing(tmp_path: Path) -> None:
    keep_profile(tmp_path, measured(1, 0.5))
    assert keep_profile(tmp_path, PROFILE).proxy is None


def test_older_and_damaged_profiles_are_as_if_absent(tmp_path: Path) -> None:
    path, _ = keep_profile(tmp_path, measured(1, 0.5))
    path.write_text(path.read_text().replace('"format_version": 4', '"format_version": 3'))
    proxy_path(path.parent, MACHINE.machine_id).write_bytes(b"\xff")
    _, proxy = keep_profile(tmp_path, measured(2, 0.5))
    assert proxy is not None and (proxy.models, proxy.samples) == (1, 8)
