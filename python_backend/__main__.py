"""The process of an instance: `PYTHON python_backend/__main__.py CONTROL_FD LISTENER_FD VALUES_FD FLAGS_FD
PARENT_PID`.

It is started by path, with any Python that has numpy. `gangway` is then a package of this folder alone. The process
that is started stays as the instance's keeper (`keeper.py`).

The instance says over the control socket which process it is (`begun`), and the supervisor what to load. The answers
are `config`, if model.py completes it; then
`ready`, or `error` with the reason, and the process ends. `finalize` ends it when it has done what it does. The values
of metrics lie in the memory VALUES_FD (`custom_metrics.py`), and which requests are cancelled in FLAGS_FD
(`cancellations.py`).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

_BACKLOG = 128
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)  # the supervisor ends instances itself
_END_SECONDS = 1.0  # for what the model has left to be done at the end
_FOLDER = Path(__file__).resolve().parent


def _make_importable() -> None:
    """Let `gangway.python_backend` be this folder, and take the folder itself from the paths of imports."""
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != _FOLDER]
    for name, folder in (("gangway", []), ("gangway.python_backend", [str(_FOLDER)])):
        module = types.ModuleType(name)
        module.__path__ = folder
        sys.modules[name] = module


def _name_utils() -> Any:
    """Let models import what they are given by the names that it has in Triton."""
    pb_utils = importlib.import_module("gangway.python_backend.triton_python_backend_utils")
    sys.modules["triton_python_backend_utils"] = sys.modules["c_python_backend_utils"] = pb_utils
    return pb_utils


def main() -> None:
    """Load the model and serve it; the status is 1 if it cannot be."""
    *descriptors, parent = map(int, sys.argv[1:6])
    control_fd, listener_fd, values_fd, flags_fd = descriptors
    sys.argv[:] = [""]  # as in Triton: what the model imports may parse them
    for number in _ENDING:  # not SIG_IGN, which programs that the model starts would have, too
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
    _make_importable()
    importlib.import_module("gangway.python_backend.keeper").keep(parent, descriptors)
    importlib.import_module("gangway.python_backend.memory").keep()
    log: Any = importlib.import_module("gangway.python_backend.log")
    log.keep()
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    control, listener = socket.socket(fileno=control_fd), socket.socket(fileno=listener_fd)
    _leave_to_parent(control, listener, values_fd)
    importlib.import_module("gangway.python_backend.cancellations").attach(flags_fd)
    os.close(flags_fd)
    messages = importlib.import_module("gangway.python_backend.messages")
    links: Any = importlib.import_module("gangway.python_backend.supervisor_link")
    links.link = link = links.SupervisorLink(messages.Connection(control), values_fd)
    status = 1
    try:
        link.say({"begun": os.getpid()})
        status = _serve(link, listener)
    except BaseException as error:
        log.write_error(error)
        link.say({"error": _sentence(error)})
    finally:
        _end(status)


def _end(status: int) -> None:
    """End the process as Python does, with what is registered for that: files and folders are given back.

    Threads and children of the model keep it for a moment at most.
    """
    log: Any = importlib.import_module("gangway.python_backend.log")
    try:
        late = threading.Timer(_END_SECONDS, os._exit, (status,))
        late.daemon = True
        late.start()
        gc.collect()
        atexit._run_exitfuncs()
    except BaseException as error:
        log.write_error(error)
    finally:
        log.flush()
        os._exit(status)


def _leave_to_parent(control: socket.socket, listener: socket.socket, values_fd: int) -> None:
    """Let processes that the model starts have neither the instance's sockets nor its way with signals."""
    for descriptor in (control.fileno(), listener.fileno(), values_fd):
        os.set_inheritable(descriptor, False)

    def forget() -> None:
        control.close()
        listener.close()
        for number in _ENDING:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget)


def _sentence(error: BaseException) -> str:
    text = importlib.import_module("gangway.python_backend.log").text_of(error)
    kind, about = type(error).__name__, importlib.import_module("gangway.python_backend.memory").about(error)
    return f"{text}{about}" if kind == "TritonModelException" else f"{kind}: {text}{about}"


def _serve(link: Any, listener: socket.socket) -> int:
    order = link.order()
    if not order:  # the supervisor has gone
        return 1
    importlib.import_module("gangway.python_backend.memory").limit(order["memory_bytes"])
    pb_utils = _name_utils()
    pb_utils.model_dir = str(Path(order["folder"]) / order["arguments"]["model_version"])
    model_class = _model_class(order)
    config_text = order["config"]
    if order["completes"]:
        complete = getattr(model_class, "auto_complete_config", None)
        if complete is not None:
            completed = complete(pb_utils.ModelConfig(config_text))
            if not isinstance(completed, pb_utils.ModelConfig):
                raise TypeError("auto_complete_config returns something else than the ModelConfig that it gets")
            config_text = json.dumps(completed.as_dict())
        link.say({"config": config_text})
        order = link.order()
        if "config" not in order:  # it is not wanted any more
            return 0
        config_text = order["config"]
    model = model_class()
    if hasattr(model, "initialize"):
        model.initialize({**order["arguments"], "model_config": config_text})
    if not callable(getattr(model, "execute", None)):
        raise TypeError("TritonPythonModel has no method 'execute'")
    host_module = importlib.import_module("gangway.python_backend.host")
    config = json.loads(config_text)
    check_class = importlib.import_module("gangway.python_backend.executions").OutputCheck
    check = check_class(config, order["strict_outputs"], lambda found: _tell(link, found))
    host = host_module.Host(model, config, order["arguments"]["model_instance_name"], check)
    listener.listen(_BACKLOG)
    link.say({"ready": os.getpid(), "has_is_ready": host.has_is_ready})
    host.start_thread(_obey, link, host)
    host.run(listener)
    _finalize(model)
    host.forget_model()
    return 0


def _finalize(model: Any) -> None:
    """Let the model end what it has begun; what goes wrong there is in the log."""
    log: Any = importlib.import_module("gangway.python_backend.log")
    try:
        if hasattr(model, "finalize"):
            model.finalize()
    except BaseException as error:
        log.write_error(error)
        log.write(f"<3>finalize failed: {_sentence(error)}")


def _tell(link: Any, differences: dict[str, str]) -> None:
    """Say what of the model's responses is unlike its configuration."""
    with suppress(OSError):  # the supervisor has gone
        link.say({"differences": differences})


def _obey(link: Any, host: Any) -> None:
    """Do what the supervisor orders until it ends the instance."""
    while "is_ready" in (order := link.order()):
        host.start_thread(_tell_readiness, link, host)
    if not order:
        os._exit(1)  # the supervisor has gone
    host.stop()


def _tell_readiness(link: Any, host: Any) -> None:
    is_ready = host.is_ready()
    with suppress(OSError):  # the supervisor has gone
        link.say({"is_ready": is_ready})


def _model_class(order: dict[str, Any]) -> Any:
    """Import model.py as Triton does: as a module of the package of the version's folder."""
    folder, version = Path(order["folder"]), order["arguments"]["model_version"]
    sys.path += [str(folder / version), str(folder)]
    module = importlib.import_module(".".join((version, *Path(order["filename"]).with_suffix("").parts)))
    model_class = getattr(module, "TritonPythonModel", None)
    if not isinstance(model_class, type):
        raise TypeError(f"{order['filename']} has no class 'TritonPythonModel'")
    return model_class


def _prepare_spawned() -> None:
    """Let a process that the model has made by multiprocessing's "spawn" or "forkserver" import what the model does."""
    _make_importable()
    _name_utils()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # as which multiprocessing imports the program of the process that spawns
    _prepare_spawned()
