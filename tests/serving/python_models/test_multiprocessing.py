"""Processes that a Python model makes by multiprocessing, whichever way they are started, run the model's functions."""

from collections.abc import Iterator

import pytest

from tests.helpers.python_models import HEAD, TEXTS, config_of, executes, write
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.long

NAMES = '"square": square, "multiprocessing": multiprocessing, "futures": futures, "self": self'
# Processes are started as what `spawn` and `forkserver` import: model.py, which imports what Triton gives it.
MODEL = f"""import concurrent.futures as futures
import multiprocessing
{HEAD}
def square(number):
    return int(pb_utils.Tensor("number", np.array([number * number])).as_numpy()[0])


"""
POOL = """
    def initialize(self, args):
        multiprocessing.set_start_method("spawn")
        self.pool = multiprocessing.Pool(1)
"""
WAYS = {
    "Pool": "with multiprocessing.get_context(WAY).Pool(1) as pool: found = pool.map(square, [2, 3])",
    "Executor": "with futures.ProcessPoolExecutor(1, multiprocessing.get_context(WAY)) as pool:"
    " found = list(pool.map(square, [2, 3]))",
    "Process": "each = multiprocessing.get_context(WAY).Process(target=square, args=(3,))\n"
    "each.start()\neach.join(30)\nfound = [4, 9] if each.exitcode == 0 else each.exitcode",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "starter", executes(NAMES), config_of(*TEXTS), head=MODEL)
    write(repository, "pooled", POOL + executes(NAMES), config_of(*TEXTS), head=MODEL)
    with serving(repository) as served:
        yield served


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("what", WAYS)
def test_functions_of_the_model_run_there(served: Served, what: str, way: str) -> None:
    assert served.executed("starter", WAYS[what].replace("WAY", f"'{way}'")) == "[4, 9]"


def test_a_pool_that_the_model_makes_when_it_begins(served: Served) -> None:
    assert served.executed("pooled", "found = self.pool.map(square, [2, 3])") == "[4, 9]"
