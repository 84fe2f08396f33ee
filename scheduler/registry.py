"""The scheduling policies by name, as `--scheduler` takes them."""

from gangway.scheduler.fcfs import ModelFcfs
from gangway.scheduler.policy import Policy

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (ModelFcfs,)}
DEFAULT_POLICY = ModelFcfs.name


def make_policy(name: str) -> Policy:
    """Return a fresh policy; ValueError names the known ones."""
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"unknown scheduler {name!r}; known: {', '.join(sorted(POLICIES))}") from None
