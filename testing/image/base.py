"""The image that ours begin with: pulled, or made of Debian's packages where no registry can be reached."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from testing.image.docker import Docker, DockerMissingError

PULLED = "debian:12-slim"  # the default of the Dockerfile
LOCAL = "gangway-base:local"
SUITE = "bookworm"
PULL_SECONDS = 60
BOOTSTRAP_SECONDS = 300
NOT_WANTED = ("doc", "info", "locale", "man")  # of /usr/share
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
AUTHORITIES = Path("/usr/local/share/ca-certificates")  # of this machine: a company's proxy, for example


def base_image(docker: Docker) -> str:
    """Return the name of a base that this daemon has, once it has it. Raises DockerMissingError."""
    if chosen := os.environ.get("BASE_IMAGE"):
        return chosen
    for name in (PULLED, LOCAL):
        if docker.run("images", "--quiet", name):
            return name
    try:
        docker.run("pull", "--quiet", PULLED, seconds=PULL_SECONDS)
    except subprocess.SubprocessError:
        _bootstrap(docker)
        return LOCAL
    return PULLED


def _bootstrap(docker: Docker) -> None:
    """Make LOCAL: a minimal Debian, with the certificates of this machine, by which its own registries are reached."""
    if os.geteuid() != 0 or shutil.which("mmdebstrap") is None:
        raise DockerMissingError(f"{PULLED} cannot be pulled, and to make it takes root and mmdebstrap")
    with tempfile.TemporaryDirectory(prefix="gangway-base-") as folder:
        archive = Path(folder) / "base.tar"
        command = ["mmdebstrap", "--variant=minbase", "--include=ca-certificates,usr-is-merged"]
        command += ["--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
        command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in NOT_WANTED]
        if AUTHORITIES.is_dir():
            command += [f"--customize-hook=copy-in {AUTHORITIES} {AUTHORITIES.parent}"]
            command += ['--customize-hook=chroot "$1" update-ca-certificates']
        command += [SUITE, str(archive)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BOOTSTRAP_SECONDS, check=False)
        if done.returncode:
            raise DockerMissingError(f"{PULLED} can neither be pulled nor made: {done.stderr.strip()[-300:]}")
        change = f"ENV PIP_CERT={CERTIFICATES}"  # pip does not read the system's certificates of itself
        docker.run("import", "--change", change, str(archive), LOCAL, seconds=BOOTSTRAP_SECONDS)
