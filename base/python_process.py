"""How a process of the server starts another one in Python: nothing of the current folder becomes code.

`python -m` puts the current folder in front of all that is installed, and so does an empty entry of PYTHONPATH
(`PYTHONPATH=$PYTHONPATH:/lib` makes one). A queue.py beside the models would take the place of Python's own.
"""

import os
import sys
from collections.abc import Iterable

import msgspec


class PythonStart(msgspec.Struct, frozen=True):
    """What `subprocess.Popen` gets: the command, and all variables of the new process."""

    command: list[str]
    environment: dict[str, str]


def start_of(module: str, arguments: Iterable[str] = ()) -> PythonStart:
    """Return how a module of Gangway is started, in the Python and with the packages of this process.

    The packages of a virtual environment, of the user, and of PYTHONPATH count as they do here.
    """
    mode = "-I" if sys.flags.isolated else "-P"  # -I: as this process, without the user's packages and PYTHONPATH
    return PythonStart([sys.executable, mode, "-m", module, *arguments], python_environment())


def python_environment() -> dict[str, str]:
    """Return this process's variables, for any Python: PYTHONPATH names absolute folders, and none by an empty entry.

    Relative ones mean this process's current folder, wherever the new process works.
    """
    variables = dict(os.environ)
    folders = [os.path.abspath(folder) for folder in variables.pop("PYTHONPATH", "").split(os.pathsep) if folder]
    return variables | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})
