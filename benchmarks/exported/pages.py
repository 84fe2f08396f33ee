"""`python -m benchmarks.exported.pages`: follows the pages about exporters, with the pinned packages of this folder."""

import sys
import tempfile
from contextlib import closing
from pathlib import Path

from benchmarks.exported.environments import ENVIRONMENTS, install
from benchmarks.exported.make import CACHE
from testing.pages import PageReader, blocks_of

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGES = {"from-scikit-learn.md": "sklearn", "from-pytorch.md": "torch"}  # -> environment


def main() -> int:
    """Install what each page needs, and follow it. Raises AssertionError where a page is wrong."""
    for page, name in PAGES.items():
        (environment,) = (each for each in ENVIRONMENTS if each.name == name)
        python = install(environment, CACHE / "environments")
        packages = next((python.parents[1] / "lib").glob("python*")) / "site-packages"
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder, "cache")
            cache.mkdir()
            with closing(PageReader(Path(folder), cache, str(packages))) as reader:
                for block in blocks_of(HOW_TO / page):
                    reader.follow(block)
        print(f"{page}: works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
