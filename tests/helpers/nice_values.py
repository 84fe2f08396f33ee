"""Processes that may not raise their priority, as in a container."""

import os

# Words before a command.
WITHOUT_PRIVILEGE = ("setpriv", "--inh-caps=-sys_nice", "--bounding-set=-sys_nice") if os.getuid() == 0 else ()
