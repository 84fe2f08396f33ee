"""A `gangway` command in the process of a test: starting Python and importing takes longer than most commands do."""

from gangway.server.cli import run


def status_of(name: str, *arguments: str) -> int:
    """Run the command; return its exit status, also that of arguments which argparse refuses."""
    try:
        return run(name, list(arguments))
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        return stopped.code
