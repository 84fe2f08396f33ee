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
