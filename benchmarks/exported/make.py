"""Makes the environments of all exporters and the files that they write: 6 GB, and half an hour on 2 cores.

    python -m benchmarks.exported.make [--cache DIR] [ENVIRONMENT ...] [--only REGEX ...]

What is there is kept. An environment that does not install is reported and skipped, and so is a file that an exporter
does not write. Each file has a description of requests beside it (`exporters/files.py`).
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.exported.environments import ENVIRONMENTS, HERE, install

CACHE = Path("~/.cache/gangway-exported").expanduser()


def main() -> int:
    """Make them; return 1 if something was skipped."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    names = [each.name for each in ENVIRONMENTS]
    parser.add_argument("environments", nargs="*", choices=[*names, []], metavar="ENVIRONMENT", help=", ".join(names))
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"environments and files ({CACHE})")
    parser.add_argument("--only", action="append", default=[], metavar="REGEX", help="names of files")
    options = parser.parse_args()
    is_complete = True
    for environment in ENVIRONMENTS:
        if options.environments and environment.name not in options.environments:
            continue
        try:
            python = install(environment, options.cache / "environments")
        except subprocess.CalledProcessError as error:
            print(f"skipped {environment.name}: {error}", file=sys.stderr)
            is_complete = False
            continue
        for script, folder in environment.scripts.items():
            file, target = HERE / "exporters" / f"{script}.py", options.cache / folder
            done = subprocess.run([str(python), str(file), str(target), *options.only], check=False)
            is_complete &= done.returncode == 0
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
