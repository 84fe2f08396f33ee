"""Downloads for benchmarks: through pip and the system's tools, with errors that say what to do."""

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"  # git ignores it
TIMEOUT_S = 600


class FetchError(Exception):
    """Something could not be downloaded; the text says what, and what to do."""


def pip_download(requirement: str, folder: Path, platforms: tuple[str, ...] = ()) -> Path:
    """Return the path of a wheel, without what it depends on. `platforms`: its tags, where pip would reject them."""
    before = set(folder.iterdir())
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    options += [f"--platform={platform}" for platform in platforms]
    run([sys.executable, "-m", "pip", "download", *options, f"--dest={folder}", requirement], requirement)
    (wheel,) = set(folder.iterdir()) - before
    return wheel


def run(command: list[str], what: str, folder: Path | None = None) -> None:
    """Run a command that fetches something. Raises FetchError."""
    try:
        done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"no answer within {error.timeout:.0f} s while fetching {what}") from error
    if done.returncode != 0:
        raise FetchError(
            f"cannot fetch {what}: `{' '.join(command)}` says\n{done.stderr.strip() or done.stdout.strip()}"
        )


def succeeds(command: list[str], environment: dict[str, str] | None = None) -> bool:
    """Say whether a command ends with status 0 within a minute."""
    return subprocess.run(command, check=False, env=environment, capture_output=True, timeout=60).returncode == 0
