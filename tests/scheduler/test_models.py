"""The scheduler's table of models: what is asked of a model stays with it."""

from gangway.scheduler.messages import LoadModel, SetProfile
from gangway.scheduler.models import ModelTable


def test_target_and_queue_policy_reach_the_profile() -> None:
    table = ModelTable(cores=2)
    table.set_profile(SetProfile(3, 10.0, 20.0, True))  # of a model that is not there
    table.serve(table.add(LoadModel(3, "m", "key", layers=2, max_ranks=2, arena_bytes=64, max_rows=1)))
    assert (table.profiles[3].qos_us, table.profiles[3].rejects_late) == (None, False)
    table.set_profile(SetProfile(3, 10.0, 20.0, True))
    seen = table.profiles[3]
    assert (seen.isolated_us, seen.qos_us, seen.rejects_late) == (10.0, 20.0, True)


def test_runs_of_onnxruntime_show_how_many_cores_they_need() -> None:
    """Three in succession, of a model whose requests have sizes of their own."""
    table = ModelTable(cores=4)
    for number, indivisible in ((3, True), (4, False), (5, True)):
        loaded = LoadModel(number, "m", "key", 1, max_ranks=2, arena_bytes=64, max_rows=1, indivisible=indivisible)
        table.serve(table.add(loaded))
        table.set_profile(SetProfile(number, 300.0, qos_us=20.0, varies=number != 5))
    before, changes = dict(table.profiles), table.changes
    for number, run_us in ((3, 9e3), (3, 9e3), (3, 300.0), (3, 9e3), (3, 9e3), *[(4, 9e3), (5, 9e3), (6, 9e3)] * 4):
        table.ran(number, run_us)
    assert (dict(table.profiles), table.changes, before[3].max_ranks) == (before, changes, 1)
    table.ran(3, 9e3)
    seen = table.profiles[3]
    assert seen.max_ranks == 2 and table.changes > changes
    assert seen.span_us(0, 1, cores=2) < seen.span_us(0, 1, cores=1) == 9e3
    assert (seen.isolated_us, seen.qos_us, seen.varies) == (300.0, 20.0, True)
    for run_us in (1.5e3, 1.5e3, 1.5e3, 500.0, 500.0, 500.0):
        assert table.profiles[3].max_ranks == 2
        table.ran(3, run_us)
    assert table.profiles[3].max_ranks == 1
