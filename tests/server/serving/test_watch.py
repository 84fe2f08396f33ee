"""What watchers read of a decision: what was decided, then why."""

from typing import Any

import pytest

from gangway.server.serving.watch import explain

NOTED = {
    "cores": [0, 1], "wanted": 0, "rows": 1, "layer": 0, "end_layer": 12, "blocks": 0, "age_us": 1200,
    "slack_us": 8340, "free": 2, "waiting": 3, "reason": "idle",
}  # fmt: skip


@pytest.mark.parametrize(
    ("noted", "text"),
    [
        ({"decision": "Start"}, "start 1 row on cores 0, 1, layers 0 to 11; because: idle "
         "(slack 8.3 ms, waited 1.2 ms; before: 2 cores free, 3 requests waiting)"),
        ({"decision": "Start", "cores": [3], "wanted": 2, "rows": 4, "end_layer": 1, "waiting": 1, "free": 1},
         "start 4 rows on core 3 (2 wanted), layer 0; because: idle "
         "(slack 8.3 ms, waited 1.2 ms; before: 1 core free, 1 request waiting)"),
        ({"decision": "Start", "blocks": 2, "layer": 3, "slack_us": None},
         "start 1 row on cores 0, 1, layers 3 to 11, planned in 3 blocks; because: idle (no deadline, "),
        ({"decision": "Stop", "slack_us": -1500},
         "stop on cores 0, 1, to go on later; because: idle (deadline missed by 1.5 ms; before: "),
        ({"decision": "Resize", "cores": [1]}, "go on with core 1; because: idle (slack 8.3 ms; before: "),
        ({"decision": "Replan", "blocks": 1}, "new plan on cores 0, 1, 1 block to come; because: "),
        ({"decision": "StartOver", "layer": 7}, "give up what was computed up to layer 7, and start over later; "),
        ({"decision": "Refuse", "reason": ""}, "refuse 1 row; because: no reason given by the scheduling policy ("),
    ],
)  # fmt: skip
def test_a_decision_is_explained_in_words(noted: dict[str, Any], text: str) -> None:
    assert explain({**NOTED, **noted}).startswith(text)
