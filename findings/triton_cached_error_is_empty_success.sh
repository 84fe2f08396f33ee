#!/usr/bin/env bash
# Triton's response cache answers the second of two equal requests with a success without outputs, if the first failed.
#
# A good guess: a response with an error is not kept, so an equal request is executed again, or it is kept as the error.
# Seen instead: the first request has the model's error, whether that answers with a TritonError or raises. The next one
# is a success without outputs, and the model is not asked: a client that tries again takes nothing for the answer. Nor
# does the cache tell which outputs are asked for: after a request for y an equal one for z is answered with y.
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
GRPC, HTTP = 18441, 18442
MODEL = f"""
import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = backend.get_input_tensor_by_name(request, "x").as_numpy()
            with open({str(folder / "notes")!r}, "a") as notes:
                notes.write(f"{{x[0]}}\\n")
            if x[0] == 1:
                responses.append(backend.InferenceResponse(error=backend.TritonError("one is refused")))
            elif x[0] == 2:
                raise ValueError("two is refused")
            else:
                responses.append(backend.InferenceResponse([backend.Tensor("y", x), backend.Tensor("z", -x)]))
        return responses
"""
CONFIG = """
backend: "python"
input [{ name: "x" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "y" data_type: TYPE_INT32 dims: [1] }, { name: "z" data_type: TYPE_INT32 dims: [1] }]
response_cache { enable: true }
"""

with zipfile.ZipFile(next(folder.glob("nvidia_pytriton*.whl"))) as archive:
    archive.extractall(folder / "wheel")
triton = folder / "wheel" / "pytriton" / "tritonserver"
stub = triton / "backends" / "python" / "triton_python_backend_stub"
shutil.copy(triton / "python_backend_stubs" / "{}.{}".format(*sys.version_info) / stub.name, stub)
for program in (stub, triton / "bin" / "tritonserver"):
    program.chmod(0o755)
(folder / "models" / "m" / "1").mkdir(parents=True)
(folder / "models" / "m" / "config.pbtxt").write_text(CONFIG)
(folder / "models" / "m" / "1" / "model.py").write_text(MODEL)
libraries = [str(folder / "wheel" / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
environment["PATH"] = f"{folder / 'venv' / 'bin'}:{environment['PATH']}"
command = [triton / "bin" / "tritonserver", f"--model-repository={folder / 'models'}", "--allow-metrics=false",
           f"--grpc-port={GRPC}", f"--http-port={HTTP}", f"--backend-directory={triton / 'backends'}",
           f"--cache-directory={triton / 'caches'}", "--cache-config=local,size=1048576",
           "--backend-config=python,shm-region-prefix-name=finding"]
server = subprocess.Popen(command, env=environment, stderr=(folder / "log").open("w"))


def get(path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{HTTP}{path}", json.dumps(body).encode() if body else None)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(number, *names):
    given = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [number]}]}
    given["outputs"] = [{"name": name} for name in names]
    status, text = get("/v2/models/m/infer", given)
    answer = json.loads(text)
    found = [(each["name"], each["data"]) for each in answer["outputs"]] if "outputs" in answer else answer.get("error")
    return status == 200, found


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
    seen = [ask(1, "y", "z"), ask(1, "y", "z"), ask(2, "y", "z"), ask(2, "y", "z"), ask(3, "y"), ask(3, "z")]
    executed = (folder / "notes").read_text().split()
finally:
    server.terminate()
    server.wait()
print("Triton", version, *seen, "executed:", executed, sep="\n")
assert version == "2.51.0"
assert [succeeded for succeeded, _ in seen] == [False, True, False, True, True, True]
assert seen[1] == seen[3] == (True, [])
assert seen[4] == seen[5] == (True, [("y", [3])])
assert executed == ["1", "2", "3"]
PYTHON
"$folder/venv/bin/python" "$folder/look.py" "$folder"
