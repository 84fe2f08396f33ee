"""`make image`: build both images, with a base and a daemon of our own where there are none."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from testing.image.base import base_image
from testing.image.docker import Docker, DockerMissingError, docker

ROOT = Path(__file__).parents[2]
FULL, SERVE = "gangway", "gangway:serve"


@dataclass(frozen=True)
class Images:
    """The names of both images in a daemon."""

    full: str
    serve: str


def build(daemon: Docker, full: str = FULL, serve: str = SERVE) -> Images:
    """Build both images of this checkout. Raises CalledProcessError, DockerMissingError."""
    base = f"--build-arg=BASE_IMAGE={base_image(daemon)}"
    daemon.build("--target=serve", base, f"--tag={serve}", str(ROOT))
    daemon.build(base, f"--tag={full}", str(ROOT))
    return Images(full, serve)


def main() -> int:
    """Build; return 1 where there is no Docker."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        with docker() as daemon:
            images = build(daemon)
            for name in (images.full, images.serve):
                print(f"{name}: {daemon.size_bytes(name) / 1e6:.0f} MB")
    except DockerMissingError as error:
        print(f"no image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
