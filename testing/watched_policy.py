"""A policy that is watched: what measures or counts its decisions derives from this, and extends `decide`."""

from collections.abc import Sequence

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Decision, LoneStart, Query, Snapshot
from gangway.scheduler.profiles import ModelProfile


class WatchedPolicy(Policy):
    """Decides as the policy `inner` does, which learns all that this one is told. It is shown to drivers as `inner`."""

    def __init__(self, inner: Policy) -> None:
        self.name, self.config = inner.name, inner.config
        self.batches = inner.batches
        self.inner = inner

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Let the policy decide."""
        return self.inner.decide(snapshot)

    def lone_start(self, model: ModelProfile, core_count: int, level: float) -> LoneStart | None:
        """Return what the policy says."""
        return self.inner.lone_start(model, core_count, level)

    def arrived(self, query: Query) -> None:
        """Let the policy note it."""
        self.inner.arrived(query)

    def finished(self, query: Query, now_us: float) -> None:
        """Let the policy note it."""
        self.inner.finished(query, now_us)
