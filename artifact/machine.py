"""What tells machines apart: measurements lie in the cache under these names."""

import hashlib
import json
import os
from pathlib import Path


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name, family, model and stepping, as far as the system tells."""
    first = cpuinfo.read_text().partition("\n\n")[0]
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = [values.get(key, "?") for key in ("cpu family", "model", "stepping")]
    return f"{values.get('model name', 'unknown CPU')} ({'/'.join(numbers)})"


def machine_id(cpu: str, cores: int, target: str) -> str:
    """Return what tells machines apart: 12 hex digits of a SHA-256."""
    return hashlib.sha256(json.dumps([cpu, cores, target]).encode()).hexdigest()[:12]


def whole_machine_id(target: str) -> str:
    """Return the id of this machine with all its cores, whichever of them this process may use."""
    return machine_id(cpu_name(), os.cpu_count() or 1, target)
