"""Queue delays, timeouts and pauses of sequences beyond a day, up to what the fields hold: a server that lives on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.helpers.python_models import ADD, config_of, write
from tests.helpers.served import Served, inputs_of, serving

pytestmark = pytest.mark.long

DAY_US = 86_400_000_000
LONGEST_US = (1 << 64) - 1
TIMES_US = (DAY_US, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, LONGEST_US)
POLICY = "timeout_action: ACTION default_timeout_microseconds: TIME allow_timeout_override: true"
KINDS = {
    "delay": "dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: TIME }",
    "reject": f"dynamic_batching {{ default_queue_policy {{ {POLICY.replace('ACTION', 'REJECT')} }} }}",
    "late": f"dynamic_batching {{ default_queue_policy {{ {POLICY.replace('ACTION', 'DELAY')} }} }}",
    "idle": "sequence_batching { max_sequence_idle_microseconds: TIME }",
    "oldest": "sequence_batching { oldest { max_candidate_sequences: 4 max_queue_delay_microseconds: TIME } }",
    "direct": "sequence_batching { direct { max_queue_delay_microseconds: TIME minimum_slot_utilization: 1 } }",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = tmp_path_factory.mktemp("models")
    write(models, "sound", ADD)
    for kind, config in KINDS.items():
        for number, time_us in enumerate(TIMES_US):
            write(models, f"{kind}{number}", ADD, config_of(batch=4, more=config.replace("TIME", str(time_us))))
    with serving(models, "--model-control-mode=explicit", "--load-model=sound") as served:
        yield served


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_time_harms_nobody(served: Served, kind: str, first: int) -> None:
    """Of TIMES_US every other one."""
    pids = served.server.pids()
    with ThreadPoolExecutor(len(TIMES_US)) as pool:
        list(pool.map(partial(use, served, kind), range(first, len(TIMES_US), 2)))
    assert served.infer("sound", x=np.ones(4, np.float32))["y"][0] == 2
    for role in ("front end", "scheduler"):
        assert served.server.pids()[role] == pids[role]
    assert "Traceback" not in served.log()


def use(served: Served, kind: str, number: int) -> None:
    """Load a model with such a time, unless it is refused; what it has to wait for costs others nothing."""
    name, client = f"{kind}{number}", served.client
    try:
        client.load_model(name)
    except InferenceServerException as error:
        assert "microseconds" in str(error.message())
        return
    first, second = ({"sequence_id": number, "sequence_start": True} for number in (7, 8))
    if "sequence" not in KINDS[kind]:
        first = second = {}
    whole, part = (inputs_of({"x": np.ones((rows, 4), np.float32)}) for rows in (4, 1))
    if kind != "direct":
        answer = client.infer(name, part if first else whole, client_timeout=20, **first)
        assert answer.as_numpy("y")[0, 0] == 2
    try:  # it waits, or is answered
        client.infer(name, part, client_timeout=0.5, timeout=LONGEST_US >> 1, **second)
    except InferenceServerException as error:
        assert "deadline" in str(error.message()).lower()
    assert served.infer("sound", x=np.ones(4, np.float32))["y"][0] == 2
    client.unload_model(name)
