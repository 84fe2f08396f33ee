"""The level of interference from counters of the last-level cache: VELTAIR's way, where the machine has them."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from gangway.artifact.profile import ProfileError
from gangway.artifact.proxy import InterferenceProxy, proxy_path, read_proxy
from gangway.executor.counter_rates import CounterRates
from gangway.executor.perf_events import cache_events
from gangway.scheduler.interference import Unit

INTERVAL_US: Final = 5_000.0
LOOKS_SHARE: Final = 1 / 200  # of the time: a look takes a microsecond a core, and forty in a virtual machine
LEAST_EXPLAINED: Final = 0.5  # of the levels' variance: a line that explains less knows less than finished units do
_log = logging.getLogger(__name__)


class Rates(Protocol):
    """Accesses and misses per thousand cycles of these cores since the last look; None if nothing is known."""

    def look(self, cores: Sequence[int]) -> tuple[float, ...] | None:
        """Look at them."""


class CounterInterference:
    """What the machine's proxy makes of the counters of all workers' cores.

    They are looked at every 5 ms at most, and less often where looks take more than LOOKS_SHARE of the time.
    """

    name = "counters of the last-level cache"

    def __init__(
        self,
        proxy: InterferenceProxy,
        rates: Rates,
        cores: Sequence[int],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._proxy = proxy
        self._rates = rates
        self._cores = cores
        self._clock_ns = clock_ns
        self._level = 0.0
        self._next_us = 0.0

    def finished(self, unit: Unit, now_us: float) -> None:
        """Units say nothing here: counters are read instead."""

    def level(self, now_us: float) -> float:
        """Return the level in the last interval in which workers did something."""
        if now_us >= self._next_us:
            begin_ns = self._clock_ns()
            rates = self._rates.look(self._cores)
            look_us = (self._clock_ns() - begin_ns) / 1e3
            self._next_us = now_us + max(INTERVAL_US, look_us / LOOKS_SHARE)
            if rates is not None:
                self._level = self._proxy.level(rates[0], rates[1])
        return self._level


def from_profiles(profiles: Path, machine_id: str, cores: Sequence[int]) -> CounterInterference | None:
    """Return what the folder of profiles knows about this machine; None if that is nothing, or cannot be counted."""
    path = proxy_path(profiles, machine_id)
    events = cache_events()
    if events is None or not path.exists():
        return None
    try:
        proxy = read_proxy(path)
    except ProfileError as error:
        _log.warning("counters ignored: %s", error)
        return None
    if (events[0].name, events[1].name) != (proxy.accesses, proxy.misses):
        return None
    if proxy.r_squared < LEAST_EXPLAINED or proxy.per_miss_rate <= 0:  # misses that mean calm: a line through chance
        explained = "they explain %.0f %% of the interference, %+.3g for each miss per access"
        _log.info(f"counters ignored: {explained}", 100 * proxy.r_squared, proxy.per_miss_rate)
        return None
    return CounterInterference(proxy, CounterRates(events), cores)
