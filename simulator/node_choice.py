"""Which scheduler gets a request, where a machine has several: that of the largest predicted slack.

Slack is the time left until the deadline, less what goes before and the request's own time. Deadline and own time are
the same wherever it goes. So the largest slack is where the work that has not been answered takes the cores least time:
least work left (Harchol-Balter, Performance Modeling and Design of Computer Systems, 2013, chapter 24), per core.
"""

from collections.abc import Sequence

Nodes = Sequence[int]


def choose_node(work_us: Sequence[float], cores: Sequence[int], turn: int = 0, allowed: Nodes | None = None) -> int:
    """Return a node's number. `work_us`: one core's time for what each node has; `cores`: in service there.

    Of equal ones the first from number `turn` (modulo) on. A node without cores is chosen if no other is allowed.
    `allowed`: the nodes that come into question; None: all. Raises ValueError if there is none.
    """
    count = len(work_us)
    best, least = -1, float("inf")
    for offset in range(count):
        node = (turn + offset) % count
        if allowed is not None and node not in allowed:
            continue
        busy_us = work_us[node] / cores[node] if cores[node] else float("inf")
        if busy_us < least or best < 0:
            best, least = node, busy_us
    if best < 0:
        raise ValueError("no node is allowed")
    return best
