"""Downloads for benchmarks: through pip and the system's tools, with errors that say what to do."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TOOLS = Path(__file__).parent.parent / "tools"  # git ignores it
TIMEOUT_S = 600


class FetchError(Exception):
    """Something could not be downloaded; the text says what, and what to do."""


def report(command: str, fetch: Callable[[], object], found: Callable[[], str] | None = None) -> int:
    """Fetch for a command, and print what was `found`; return the exit status: 0, or 1 with the reason on stderr."""
    try:
        fetch()
    except FetchError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    if found:
        print(found())
    return 0


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


def debian_package(package: str, scratch: Path, otherwise: str, suite: str = "") -> Path:
    """Return a folder with the content of a package of Debian, which is not installed: root is not needed.

    `suite`: a release of Debian, if not the system's own. Raises FetchError, with what to do `otherwise` on a machine
    that has no packages of this kind.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise FetchError(f"this machine has no apt-get for Debian's package {package}: {otherwise}")
    folder = scratch / package
    folder.mkdir()
    run([*_apt(package, scratch, suite), "download", package], package, folder)
    (archive,) = folder.glob("*.deb")
    run(["dpkg", "--extract", str(archive), str(folder / "content")], package)
    return folder / "content"


def _apt(package: str, scratch: Path, suite: str) -> list[str]:
    """Return the apt-get command: with the system's lists if they know the package, else with lists of our own."""
    if not suite and succeeds(["apt-cache", "show", package]):
        return ["apt-get"]
    lists = scratch / f"apt{suite}/lists/partial"
    apt = ["apt-get", f"-oDir::State::lists={lists.parent}", f"-oDir::Cache={lists.parents[1]}/cache"]
    if suite:
        told = subprocess.run(
            ["apt-get", "indextargets", "--format=$(LABEL) $(REPO_URI)"], check=False, capture_output=True
        )
        mirrors = {line.split()[1] for line in told.stdout.decode().splitlines() if line.startswith("Debian ")}
        if not mirrors:
            raise FetchError(f"this machine's apt-get knows no mirror of Debian for {suite}: run `apt-get update`")
        sources = scratch / f"{suite}.list"
        signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
        sources.write_text(f"deb {signed} {min(mirrors)} {suite} main\n")
        apt += [
            f"-oDir::Etc::sourcelist={sources}",
            "-oDir::Etc::sourceparts=/dev/null",
            "-oDir::State::status=/dev/null",
        ]
    if not lists.exists():
        lists.mkdir(parents=True)
        (lists.parents[1] / "cache/archives/partial").mkdir(parents=True)
        run([*apt, "update"], "Debian's package lists")
    return apt
