"""parties against cases worked out by hand."""

from gangway.scheduler.policies.baselines import INTERVAL_US, Parties
from gangway.scheduler.policy import Query, RunningBlock, Snapshot, Start
from gangway.scheduler.profiles import ModelProfile

FAST, SLOW, IDLE = 1, 2, 3


def model(model_id: int, qos_us: float | None = 10_000.0) -> ModelProfile:
    return ModelProfile(model_id, "", 3, 64, (((100.0,) * 8,),) * 3, qos_us=qos_us)


def query(query_id: int, model_id: int, arrival_us: float = 0.0) -> Query:
    return Query(query_id, model_id, 1, arrival_us, arrival_us + 10_000.0 if model_id != IDLE else None)


class Driver:
    """Two models with targets on eight cores, and one without on demand."""

    def __init__(self, *model_ids: int, cores: int = 8) -> None:
        self.policy = Parties()
        self.models = {one: model(one, None if one == IDLE else 10_000.0) for one in model_ids}
        self.cores = cores
        self.decide([])

    def decide(
        self, waiting: list[Query], running: list[RunningBlock] | None = None, now_us: float = 0.0
    ) -> list[Start]:
        busy = {core for block in running or [] for core in block.cores}
        free = tuple(core for core in range(self.cores) if core not in busy)
        decisions = self.policy.decide(Snapshot(now_us, waiting, running or [], free, self.cores, self.models))
        return [one for one in decisions if isinstance(one, Start)]

    def shares(self, now_us: float) -> dict[int, int]:
        """Return how many cores a query of each model gets."""
        return {
            model_id: len(self.decide([query(100 + model_id, model_id, now_us)], now_us=now_us)[0].cores)
            for model_id in self.models
        }

    def feed(self, model_id: int, latency_us: float) -> None:
        self.policy.finished(query(1, model_id), latency_us)


def test_equal_shares_and_queues_of_their_own() -> None:
    waiting = [query(1, FAST), query(2, FAST), query(3, SLOW)]
    started = Driver(FAST, SLOW).decide(waiting)
    assert [(one.query_id, one.cores) for one in started] == [(1, (0, 1, 2, 3)), (3, (4, 5, 6, 7))]


def test_a_model_does_not_use_another_one_s_cores() -> None:
    running = RunningBlock(query(1, FAST), 3, (0, 1, 2, 3), 0.0)
    assert Driver(FAST, SLOW).decide([query(2, FAST)], [running]) == []


def test_a_core_moves_to_the_model_with_least_slack_once_in_half_a_second() -> None:
    driver = Driver(FAST, SLOW)
    driver.feed(FAST, 1000.0)  # slack 90 %
    driver.feed(SLOW, 9800.0)  # 2 %
    assert driver.shares(INTERVAL_US - 1) == {FAST: 4, SLOW: 4}
    assert driver.shares(INTERVAL_US) == {FAST: 3, SLOW: 5}
    assert driver.shares(2 * INTERVAL_US - 1) == {FAST: 3, SLOW: 5}


def test_between_the_thresholds_nothing_moves() -> None:
    driver = Driver(FAST, SLOW)
    driver.feed(FAST, 1000.0)
    driver.feed(SLOW, 9000.0)  # 10 %
    assert driver.shares(INTERVAL_US) == {FAST: 4, SLOW: 4}


def test_much_slack_everywhere_frees_a_core_which_is_the_next_one_given() -> None:
    driver = Driver(FAST, SLOW)
    driver.feed(FAST, 1000.0)
    driver.feed(SLOW, 5000.0)
    assert driver.shares(INTERVAL_US) == {FAST: 3, SLOW: 4}
    driver.feed(FAST, 1000.0)
    driver.feed(SLOW, 12_000.0)
    assert driver.shares(2 * INTERVAL_US) == {FAST: 3, SLOW: 5}


def test_best_effort_has_what_is_unused() -> None:
    driver = Driver(FAST, IDLE)
    driver.feed(FAST, 1000.0)
    assert driver.shares(INTERVAL_US) == {FAST: 3, IDLE: 5}


def test_queries_that_never_start_count_as_late() -> None:
    driver = Driver(FAST, SLOW)
    waiting = [query(5, SLOW, INTERVAL_US - 11_000.0)]
    assert len(driver.decide(waiting, now_us=INTERVAL_US)[0].cores) == 5


def test_the_tail_is_the_99th_percentile() -> None:
    driver = Driver(FAST, SLOW)
    for _ in range(199):
        driver.feed(SLOW, 9000.0)
    driver.feed(SLOW, 20_000.0)
    driver.feed(FAST, 1000.0)
    assert driver.shares(INTERVAL_US) == {FAST: 4, SLOW: 4}


def test_more_models_than_cores() -> None:
    driver = Driver(FAST, SLOW, IDLE, cores=2)
    started = driver.decide([query(1, FAST), query(2, FAST), query(3, SLOW), query(4, IDLE)])
    assert [(one.query_id, one.cores) for one in started] == [(1, (0,)), (3, (1,))]
