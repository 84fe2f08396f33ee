"""Keeps what was measured of a model, and learns anew from all models what counters tell about this machine."""

from pathlib import Path
from typing import NamedTuple

from gangway.artifact.profile import Profile, machine_profiles, write_profile
from gangway.artifact.proxy import InterferenceProxy, write_proxy
from gangway.executor.proxy_fit import pooled_proxy


class Kept(NamedTuple):
    """Where a profile lies, and the machine's proxy since then; None: caches are not counted, or all were calm."""

    path: Path
    proxy: InterferenceProxy | None


def keep_profile(cache_dir: Path, profile: Profile) -> Kept:
    """Write a profile over that artifact's older one, and the proxy that follows from all profiles of the machine.

    Where no proxy follows, the one that is there stays. Raises OSError.
    """
    path = write_profile(cache_dir, profile)
    if not profile.counters.events:
        return Kept(path, None)
    machine = profile.machine.machine_id
    logs = [one.counters for one in machine_profiles(path.parent, machine)]
    proxy = pooled_proxy(machine, profile.counters.events, logs)
    if proxy is not None:
        write_proxy(path.parent, proxy)
    return Kept(path, proxy)
