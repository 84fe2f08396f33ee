#!/usr/bin/env bash
# Triton refuses every request to a Python model whose sequence control for the correlation id is a string.
#
# A good guess: a CORRID control of TYPE_STRING gives the model the text that clients send as sequence_id, as one of
# TYPE_UINT64 gives it the number; the configuration is accepted and the model is ready.
# Seen instead: all requests fail before the model is asked, with text and with numbers as sequence ids, since the
# control tensor is found to have two elements where one is expected. The same model with TYPE_UINT64 answers.
# Seen with: Triton 2.51.0 (nvidia-pytriton 0.7.0 carries it), Python 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/pip"
"$pip" install --quiet --disable-pip-version-check numpy==1.26.4
"$pip" download --quiet --disable-pip-version-check --no-deps --dest "$folder" nvidia-pytriton==0.7.0
cat > "$folder/look.py" <<'PYTHON'
import json, os, shutil, subprocess, sys, sysconfig, time, urllib.error, urllib.request, zipfile
from pathlib import Path

folder = Path(sys.argv[1])
GRPC, HTTP = 18451, 18452
MODEL = """
import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    def execute(self, requests):
        ids = [backend.get_input_tensor_by_name(request, "id").as_numpy().reshape(-1) for request in requests]
        return [backend.InferenceResponse([backend.Tensor("y", np.array([each.size], np.int32))]) for each in ids]
"""
CONFIG = """
backend: "python"
input {{ name: "x" data_type: TYPE_INT32 dims: [1] }}
output {{ name: "y" data_type: TYPE_INT32 dims: [1] }}
sequence_batching {{
  control_input {{ name: "id" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{} }} }}
}}
"""

with zipfile.ZipFile(next(folder.glob("nvidia_pytriton*.whl"))) as archive:
    archive.extractall(folder / "wheel")
triton = folder / "wheel" / "pytriton" / "tritonserver"
stub = triton / "backends" / "python" / "triton_python_backend_stub"
shutil.copy(triton / "python_backend_stubs" / "{}.{}".format(*sys.version_info) / stub.name, stub)
for program in (stub, triton / "bin" / "tritonserver"):
    program.chmod(0o755)
for kind in ("STRING", "UINT64"):
    (folder / "models" / kind / "1").mkdir(parents=True)
    (folder / "models" / kind / "config.pbtxt").write_text(CONFIG.format(kind))
    (folder / "models" / kind / "1" / "model.py").write_text(MODEL)
libraries = [str(folder / "wheel" / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
environment["PATH"] = f"{folder / 'venv' / 'bin'}:{environment['PATH']}"
command = [triton / "bin" / "tritonserver", f"--model-repository={folder / 'models'}", "--allow-metrics=false",
           f"--grpc-port={GRPC}", f"--http-port={HTTP}", f"--backend-directory={triton / 'backends'}",
           "--backend-config=python,shm-region-prefix-name=finding"]
server = subprocess.Popen(command, env=environment, stderr=(folder / "log").open("w"))


def get(path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{HTTP}{path}", json.dumps(body).encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(kind, sequence):
    given = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}]}
    given["parameters"] = {"sequence_id": sequence, "sequence_start": True, "sequence_end": True}
    status, text = get(f"/v2/models/{kind}/infer", given)
    answer = json.loads(text)
    return answer["outputs"][0]["data"] if status == 200 else answer["error"]


try:
    until = time.monotonic() + 60
    while True:
        try:
            if get("/v2/health/ready")[0] == 200:
                break
        except OSError:
            pass
        assert server.poll() is None and time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.1)
    version = json.loads(get("/v2")[1])["version"]
    seen = [ask("STRING", "abc"), ask("STRING", 7), ask("UINT64", 7)]
finally:
    server.terminate()
    server.wait()
print("Triton", version, *seen, sep="\n")
assert version == "2.51.0"
assert all("unexpected number of string elements 2 for inference input 'id', expecting 1" in each for each in seen[:2])
assert seen[2] == [1]
PYTHON
"$folder/venv/bin/python" "$folder/look.py" "$folder"
