"""The line from counters to levels, of one model and of several, on numbers made for it; and its file."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from gangway.artifact.counter_log import CounterLog, CounterSample
from gangway.artifact.profile import ProfileError
from gangway.artifact.proxy import InterferenceProxy, proxy_path, read_proxy, write_proxy
from gangway.measure.interference import IDLE, LOADS, Sample, counter_samples
from gangway.measure.profiler import fit_proxy, pooled_proxy

PROXY = InterferenceProxy("0123456789ab", "a", "m", 0.1, 0.002, 1.5, 0.99, 0.97, 42, 3)
EVENTS = ("accesses", "misses")


def samples(noise: float = 0.0, count: int = 60) -> list[CounterSample]:
    """Levels of 0.1 + 0.002 x accesses + 1.5 x miss rate; two more counters that follow the accesses."""
    generator = random.Random(5)
    made = []
    for _ in range(count):
        accesses, miss_rate = generator.uniform(5, 80), generator.uniform(0, 0.6)
        level = 0.1 + 0.002 * accesses + 1.5 * miss_rate + generator.gauss(0, noise)
        made.append(CounterSample(accesses, miss_rate * accesses, level, (3000 - 20 * accesses, 7 * accesses)))
    return made


def test_a_line_is_found_exactly() -> None:
    fit = fit_proxy(samples())
    assert fit is not None
    assert (fit.constant, fit.per_access, fit.per_miss_rate) == pytest.approx((0.1, 0.002, 1.5))
    assert fit.r_squared == pytest.approx(1.0) and fit.samples == 60
    assert fit.pca_share == pytest.approx(1.0), "four counters, two of which say nothing new"


def test_noise_lowers_what_is_explained() -> None:
    fit = fit_proxy(samples(noise=0.2))
    assert fit is not None and 0.3 < fit.r_squared < 0.9
    assert fit.per_miss_rate == pytest.approx(1.5, rel=0.25)


def test_independent_counters_lower_the_share_of_two_components() -> None:
    generator = random.Random(1)
    noisy = [dataclasses.replace(sample, others=(generator.random(), generator.random())) for sample in samples()]
    fit = fit_proxy(noisy)
    assert fit is not None and 0.5 < fit.pca_share < 0.7  # two of four


def test_too_little_to_learn_from() -> None:
    assert fit_proxy(samples(count=7)) is None
    assert fit_proxy([dataclasses.replace(sample, level=0.01) for sample in samples()]) is None
    still = [CounterSample(10.0, 1.0, level) for level in (0.0, 0.5) * 10]
    fit = fit_proxy(still)
    assert fit is not None and fit.r_squared == pytest.approx(0.0) and fit.pca_share == 1.0


def log_of(
    accesses: float, miss_rates: tuple[float, float], levels: tuple[float, float], events: tuple[str, ...] = EVENTS
) -> CounterLog:
    """Ten samples of one model: its miss rate goes from the first to the second, and the level with it, in a line."""
    made = []
    for share in (step / 9 for step in range(10)):
        miss_rate, level = (first + share * (last - first) for first, last in (miss_rates, levels))
        made.append(CounterSample(accesses, miss_rate * accesses, level))
    return CounterLog(events, tuple(made))


def test_all_models_together_have_another_line_than_each() -> None:
    """Both models miss more the more they are disturbed, but the second misses so much even when nobody disturbs."""
    small, large = log_of(10.0, (0.1, 0.3), (0.0, 1.0)), log_of(60.0, (0.5, 0.9), (0.0, 1.0))
    lines = [pooled_proxy("aa", EVENTS, logs) for logs in ([small], [large], [small, large])]
    slopes = [line.per_miss_rate for line in lines if line is not None]
    assert slopes[:2] == pytest.approx([1 / 0.2, 1 / 0.4])
    assert slopes[1] < slopes[2] < slopes[0]
    alone, _, both = lines
    assert alone is not None and both is not None
    assert (alone.models, alone.samples, both.models, both.samples) == (1, 10, 2, 20)
    assert (both.machine_id, both.accesses, both.misses) == ("aa", *EVENTS)
    assert alone.level(60.0, 0.5 * 60.0) > 1.5, "the line of one model takes the other one's calm for a storm"
    assert both.level(60.0, 0.5 * 60.0) < 0.3 and both.level(10.0, 0.1 * 10.0) < 0.3
    assert both.r_squared > 0.8


def test_models_that_contradict_each_other_explain_little_together() -> None:
    up, down = log_of(10.0, (0.1, 0.3), (0.0, 1.0)), log_of(10.0, (0.1, 0.3), (1.0, 0.0))
    both = pooled_proxy("aa", EVENTS, [up, down])
    assert both is not None and both.r_squared == pytest.approx(0.0, abs=1e-6)


def test_calm_models_and_other_events() -> None:
    loud, calm = log_of(10.0, (0.1, 0.3), (0.0, 1.0)), log_of(60.0, (0.5, 0.5), (0.0, 0.0))
    other = dataclasses.replace(loud, events=("others", "misses"))
    assert pooled_proxy("aa", EVENTS, [calm]) is None
    assert pooled_proxy("aa", EVENTS, []) is None
    both = pooled_proxy("aa", EVENTS, [calm, loud, other, CounterLog(EVENTS)])
    assert both is not None and (both.models, both.samples) == (2, 20)


def test_level() -> None:
    assert PROXY.level(100.0, 20.0) == pytest.approx(0.1 + 0.2 + 0.3)
    assert PROXY.level(0.0, 0.0) == pytest.approx(0.1)
    assert dataclasses.replace(PROXY, constant=-1.0).level(0.0, 0.0) == 0.0


def test_file(tmp_path: Path) -> None:
    path = write_proxy(tmp_path, PROXY)
    assert path == proxy_path(tmp_path, PROXY.machine_id) and read_proxy(path) == PROXY
    path.write_text(path.read_text().replace('"samples"', '"sample"'))
    with pytest.raises(ProfileError, match=r"proxy-0123456789ab.json: proxy has .* field 'sample"):
        read_proxy(path)
    write_proxy(tmp_path, dataclasses.replace(PROXY, format_version=9))
    with pytest.raises(ProfileError, match="format version 9 instead of 3"):
        read_proxy(path)
    second = {**dataclasses.asdict(PROXY), "format_version": 2}
    del second["models"]
    path.write_text(json.dumps(second))
    with pytest.raises(ProfileError, match="no field 'models'"):
        read_proxy(path)


def test_samples_of_a_profile() -> None:
    calm = {load: Sample(100.0, ((1.0,),), (10.0, 2.0, 5.0)) for load in (IDLE, *LOADS)}
    loud = {**calm, LOADS[-1]: Sample(150.0, ((2.0,),), (20.0, 8.0, 5.0)), LOADS[0]: Sample(90.0, ((1.0,),), None)}
    found = counter_samples([calm, loud, calm])
    assert len(found) == 3 * (1 + len(LOADS)) - 1
    assert max(found, key=lambda sample: sample.level) == CounterSample(20.0, 8.0, 0.5, (5.0,))
    assert found[0] == CounterSample(10.0, 2.0, 0.0, (5.0,))
