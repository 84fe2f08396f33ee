"""Arrivals: a seed means one trace; the traces are Poisson."""

from pathlib import Path

import numpy as np
import pytest

from gangway.workload.arrivals import Arrivals, poisson, poisson_for, read_trace, write_trace
from gangway.workload.mix import BUILTIN, Mix, MixModel
from gangway.workload.qos import WorkloadError

MIX = Mix("two", (MixModel("a", 3.0), MixModel("b", 1.0)))


def test_a_seed_means_one_trace_for_ever():
    # Written down: a change of numpy or of the formula that changes traces must be noticed.
    arrivals = poisson(MIX, 100, 5, seed=2)
    assert arrivals.times_us.round(3).tolist() == [27455.775, 29041.675, 34767.735, 43966.853, 51520.506]
    assert arrivals.models.tolist() == [1, 0, 0, 1, 1]


def test_a_shorter_trace_is_the_beginning_of_a_longer_one_and_a_rate_stretches_it():
    long, short, slow = poisson(MIX, 100, 1000, 3), poisson(MIX, 100, 10, 3), poisson(MIX, 50, 1000, 3)
    assert np.array_equal(long.times_us[:10], short.times_us)
    assert np.array_equal(long.models[:10], short.models)
    assert np.allclose(slow.times_us, long.times_us * 2)
    assert np.array_equal(slow.models, long.models)
    assert not np.array_equal(poisson(MIX, 100, 1000, 4).models, long.models)


def test_gaps_are_exponential_and_models_follow_weights():
    # 100 000 draws: means within 5 standard errors; of an exponential the deviation equals the mean.
    arrivals = poisson(MIX, 200, 100_000, 1)
    gaps = np.diff(arrivals.times_us, prepend=0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(5000, abs=5 * 5000 / 316)
    assert gaps.std() == pytest.approx(5000, rel=0.02)
    assert (arrivals.models == 0).mean() == pytest.approx(0.75, abs=5 * 0.0014)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.02


def test_a_duration_cuts_the_same_trace():
    cut = poisson_for(MIX, 100, 2.0, 5)
    assert cut.times_us.max() < 2e6 < poisson(MIX, 100, len(cut) + 1, 5).times_us[-1]
    assert len(poisson_for(MIX, 0.001, 1.0, 5)) == 0


def test_traces_are_written_and_read_and_sorted(tmp_path: Path):
    path = tmp_path / "trace.csv"
    arrivals = poisson(MIX, 100, 20, 9)
    write_trace(path, arrivals, MIX)
    again = read_trace(path, MIX)
    assert np.array_equal(again.times_us, arrivals.times_us)
    assert np.array_equal(again.models, arrivals.models)
    path.write_text("time_us,model\n30,b\n10,a\n")
    assert read_trace(path, MIX).models.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a CSV file"),
        ("time,model\n1,a\n", "expected a CSV file"),
        ("time_us,model\n1,c\n", "model 'c' is not in mix 'two': a, b"),
        ("time_us,model\nsoon,a\n", "could not convert"),
        ("time_us,model\n-1,a\n", "at least 0"),
        ("time_us,model\nnan,a\n", "at least 0"),
    ],
)
def test_wrong_traces_are_refused(tmp_path: Path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_trace(path, MIX)


def test_a_rate_must_be_positive_and_weights_resolved():
    with pytest.raises(WorkloadError, match="rate must be positive"):
        poisson(MIX, 0, 1, 0)
    with pytest.raises(WorkloadError, match="resolve them first"):
        poisson(BUILTIN["light"], 1, 1, 0)


def test_until_leaves_out_the_moment_itself():
    arrivals = Arrivals(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 0]))
    assert len(arrivals.until(2.0)) == 1
