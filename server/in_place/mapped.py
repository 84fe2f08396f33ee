"""A region that all workers have mapped, as a front end sees it."""

from dataclasses import dataclass, field

from gangway.server.uses import Uses


@dataclass(frozen=True, eq=False)
class MappedRegion:
    """`number` is what slots call it. It stays mapped as long as requests use it, also when its name is gone."""

    token: int  # between this front end and the supervisor
    number: int
    uses: Uses = field(default_factory=Uses)
