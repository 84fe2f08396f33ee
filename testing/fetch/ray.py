"""Fetch Ray into `tools/ray`, an environment of its own that git ignores: it runs the example of `deploy/ray`."""

import os
import sys
import venv

from testing.fetching import TOOLS, FetchError, report, run, succeeds

FOLDER = TOOLS / "ray"
PYTHON = FOLDER / "bin/python"
REQUIREMENT = "ray[serve]==2.60.0"


def with_ray() -> dict[str, str]:
    """Return the environment for a Ray of this machine alone, which tells nobody of its use."""
    return {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def missing_ray() -> str:
    """Return why there is no Ray, "" if there is one."""
    return "" if PYTHON.exists() else f"{PYTHON} is missing: run python -m testing.fetch.ray"


def fetch() -> None:
    """Make `tools/ray`, unless it is there. Raises FetchError."""
    if PYTHON.exists() and succeeds([str(PYTHON), "-c", "import ray.serve"], with_ray()):
        return
    TOOLS.mkdir(exist_ok=True)
    try:
        venv.create(FOLDER, clear=True, with_pip=True)
        run([str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", REQUIREMENT], REQUIREMENT)
    except (OSError, FetchError):
        PYTHON.unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    sys.exit(report("fetch_ray", fetch))
