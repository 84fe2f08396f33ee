"""`python -m gangway`: the command `gangway`."""

import sys

from gangway.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
