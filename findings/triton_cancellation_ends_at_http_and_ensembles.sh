#!/usr/bin/env bash
# A Python model of Triton sees that a gRPC client has gone, but no HTTP client, and none behind an ensemble.
#
# A good guess: request.is_cancelled() follows the request, so it is true soon after whoever asked has closed the
# connection or cancelled the call, whichever the protocol is, and in a step of an ensemble as in the model itself.
# Seen instead: a cancelled gRPC call is seen within some milliseconds where the client asks the model directly. The same
# call to an ensemble with this model as its only step goes unseen, and so does each closed HTTP connection: the model
# computes to the end for nobody.
# Seen with: Triton 2.51.0 (nvidia-pytriton 0.7.0 carries it), tritonclient 2.73.0, grpcio 1.85.1, Python 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/pip"
"$pip" install --quiet --disable-pip-version-check numpy==1.26.4 'tritonclient[grpc]==2.73.0' grpcio==1.85.1
"$pip" download --quiet --disable-pip-version-check --no-deps --dest "$folder" nvidia-pytriton==0.7.0
cat > "$folder/look.py" <<'PYTHON'
import os, shutil, socket, subprocess, sys, sysconfig, time, zipfile
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc

folder = Path(sys.argv[1])
GRPC, HTTP = 18431, 18432
NAMES = ("gRPC, model", "gRPC, ensemble", "HTTP, model", "HTTP, ensemble")
WATCH_S = 2.0
MODEL = f"""
import time
import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = backend.get_input_tensor_by_name(request, "x").as_numpy()
            begin = time.monotonic()
            while not (seen := request.is_cancelled()) and time.monotonic() - begin < {WATCH_S}:
                time.sleep(0.001)
            with open({str(folder / "notes")!r}, "a") as notes:
                notes.write(f"{{x[0]}} {{seen}}\\n")
            responses.append(backend.InferenceResponse([backend.Tensor("y", x)]))
        return responses
"""
TENSORS = """
input [{ name: "x" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [1] }]
"""
STEP = """
platform: "ensemble"
ensemble_scheduling { step [{ model_name: "watch" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } }] }
"""

with zipfile.ZipFile(next(folder.glob("nvidia_pytriton*.whl"))) as archive:
    archive.extractall(folder / "wheel")
triton = folder / "wheel" / "pytriton" / "tritonserver"
stub = triton / "backends" / "python" / "triton_python_backend_stub"
shutil.copy(triton / "python_backend_stubs" / "{}.{}".format(*sys.version_info) / stub.name, stub)
for program in (stub, triton / "bin" / "tritonserver"):
    program.chmod(0o755)
for name, config in (("watch", 'backend: "python"' + TENSORS), ("chain", STEP + TENSORS)):
    (folder / "models" / name / "1").mkdir(parents=True)
    (folder / "models" / name / "config.pbtxt").write_text(config)
(folder / "models" / "watch" / "1" / "model.py").write_text(MODEL)
libraries = [str(folder / "wheel" / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
environment["PATH"] = f"{folder / 'venv' / 'bin'}:{environment['PATH']}"
command = [triton / "bin" / "tritonserver", f"--model-repository={folder / 'models'}", "--allow-metrics=false",
           f"--grpc-port={GRPC}", f"--http-port={HTTP}", f"--backend-directory={triton / 'backends'}",
           "--backend-config=python,shm-region-prefix-name=finding"]
server = subprocess.Popen(command, env=environment, stderr=(folder / "log").open("w"))


def ask_grpc(model, number):
    with grpc.InferenceServerClient(f"127.0.0.1:{GRPC}") as client:
        given = grpc.InferInput("x", [1], "INT32")
        given.set_data_from_numpy(np.array([number], np.int32))
        call = client.async_infer(model, [given], lambda result, error: None)
        time.sleep(0.3)
        call.cancel()


def ask_http(model, number):
    body = '{"inputs":[{"name":"x","datatype":"INT32","shape":[1],"data":[%d]}]}' % number
    with socket.create_connection(("127.0.0.1", HTTP)) as client:
        head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        time.sleep(0.3)


try:
    until = time.monotonic() + 60
    while True:
        try:
            with grpc.InferenceServerClient(f"127.0.0.1:{GRPC}") as client:
                if client.is_server_ready():
                    version = client.get_server_metadata().version
                    break
        except Exception:
            pass
        assert server.poll() is None and time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.1)
    notes = folder / "notes"
    notes.touch()
    for number, (ask, model) in enumerate(
        ((ask_grpc, "watch"), (ask_grpc, "chain"), (ask_http, "watch"), (ask_http, "chain"))
    ):
        ask(model, number)
        while len(notes.read_text().splitlines()) <= number:
            time.sleep(0.05)
    seen = {NAMES[int(line.split()[0])]: line.split()[1] == "True" for line in notes.read_text().splitlines()}
finally:
    server.terminate()
    server.wait()
print("Triton", version, seen)
assert version == "2.51.0"
assert seen == {"gRPC, model": True, "gRPC, ensemble": False, "HTTP, model": False, "HTTP, ensemble": False}
PYTHON
"$folder/venv/bin/python" "$folder/look.py" "$folder"
