"""A machine on which VELTAIR's premise holds: cores contend, and layers have versions that bear it differently.

On the machines that were measured, neighbours hardly disturb each other, and tuning finds one version of most
layers. There adaptive compilation has nothing to choose. This machine states the premise (ASPLOS 2022, sections 2 and
3.3), so that the policies can be judged on it. Nothing here is measured. Results depend on it: with a `least_slowdown`
of 1.8 FULL carries less than AC in light and heavy.

- The level of interference that a block sees is the share of the other cores that are busy: 1 on a full machine.
- At level 1 a layer in its first version, the fastest alone, takes `most_slowdown` times as long if it only moves bytes
  (Fig. 6a: 7 times), and `least_slowdown` times if it only computes: as long as alone. In between the roofline's share
  of memory decides. Then the seven models take 1.2 to 2.4 times as long on a full machine; in Fig. 1b it is up to 1.8.
- Each further version uses smaller blocks: it is slower alone and bears interference better. The last one takes
  `version_cost` longer alone, and its slope is `tolerance` times the first one's. Between them both change evenly, the
  slope by a constant factor.
"""

from dataclasses import dataclass, replace

from gangway.scheduler.profiles import ModelProfile


@dataclass(frozen=True)
class Contention:
    """The premise, all of it. Slowdowns are times over the isolated time; `version_cost` is a share of it."""

    least_slowdown: float = 1.0
    most_slowdown: float = 7.0
    versions: int = 5
    version_cost: float = 0.25
    tolerance: float = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be."""
        if not 1 <= self.least_slowdown <= self.most_slowdown or self.versions < 1:
            raise ValueError("slowdowns are at least 1 and ordered, and there is a version")
        if self.version_cost < 0 or not 0 < self.tolerance <= 1:
            raise ValueError("versions cost at least nothing, and tolerance is a share above 0")

    def apply(self, model: ModelProfile) -> ModelProfile:
        """Return the model as on this machine: version 0 as fast alone as it was, other versions made of it."""
        latency_us, slopes = [], []
        for layer, measured in enumerate(model.latency_us):
            slope = self.slope(model.memory_us[layer], model.compute_us[layer])
            places = [index / max(1, self.versions - 1) for index in range(self.versions)]
            factors = [1 + self.version_cost * place for place in places]
            latency_us.append(tuple(tuple(factor * time_us for time_us in measured[0]) for factor in factors))
            slopes.append(tuple(slope * self.tolerance**place for place in places))
        return replace(model, latency_us=tuple(latency_us), slope=tuple(slopes))

    def slope(self, memory_us: float, compute_us: float) -> float:
        """Return the first version's relative slowdown at level 1, of a layer with these roofline times."""
        total_us = memory_us + compute_us
        share = memory_us / total_us if total_us else 0.0
        return self.least_slowdown - 1 + share * (self.most_slowdown - self.least_slowdown)
