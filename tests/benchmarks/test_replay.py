"""One trace, live through real gRPC on two cores and simulated: the two agree. `benchmarks/replay` says how."""

import os
import time

import pytest

from benchmarks.simulator.replay import CORES, MIX, TARGET, replay

# A run is judged by what others did meanwhile and how steady the machine was, never by its result.
OTHERS_AT_MOST = 0.06  # of the cores
DRIFT_AT_MOST = 0.1  # of its speed
PATIENCE_S = 40  # with a machine that is busy


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.skipif((os.cpu_count() or 1) < CORES, reason="needs two cores")
def test_live_and_simulated_agree(compiled_zoo, tmp_path):
    artifacts = {name: compiled_zoo.artifact(name) for name in MIX.names}
    outcome, attempts, end = None, 0, time.monotonic() + PATIENCE_S
    while outcome is None and (not attempts or time.monotonic() < end):
        attempts += 1
        folder = tmp_path / str(attempts)
        folder.mkdir()
        limits = {"others_at_most": OTHERS_AT_MOST, "drift_at_most": DRIFT_AT_MOST}
        outcome = replay(artifacts, compiled_zoo.repository, folder, **limits)
    if outcome is None:
        pytest.skip("other processes used the cores, or their speed changed: nothing can be compared")
    live, simulated = outcome.live, outcome.simulated
    assert simulated.mean_us == pytest.approx(live.mean_us, rel=0.15)
    assert simulated.satisfied[TARGET] == pytest.approx(live.satisfied[TARGET], abs=0.05)
