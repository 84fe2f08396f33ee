"""The command `gangway`, also as `python -m gangway`: nothing is imported from the current folder."""

import os
import sys


def main() -> int:
    """Run a command; return the exit status, as `gangway.server.cli` does."""
    _leave_current_folder()
    from gangway.server.cli import main as run  # noqa: PLC0415 - from what is left

    return run()


def _leave_current_folder() -> None:
    """Take the current folder from the import path, where `python -m` and an empty entry of PYTHONPATH have put it."""
    if __name__ == "__main__" and not sys.flags.safe_path:
        del sys.path[0]
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if len(entries) > 1 and "" in entries and not sys.flags.ignore_environment and os.getcwd() in sys.path:
        sys.path.remove(os.getcwd())


if __name__ == "__main__":
    sys.exit(main())
