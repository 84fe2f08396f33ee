"""Reader, writer and cache: what is damaged is noticed, what is written appears whole or not at all."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gangway.artifact.cache import Cache, cache_key, default_cache_dir
from gangway.artifact.format import (
    BatchKernel,
    BufferRef,
    Engine,
    Layer,
    Manifest,
    MemorySpace,
    TargetSpec,
    TensorSpec,
    Version,
)
from gangway.artifact.reader import ArtifactError, read_manifest, verify
from gangway.artifact.writer import ArtifactWriter, OnnxArtifactWriter, VariantWriter

KEY = "0123456789abcdef" * 4
TARGET = TargetSpec("avx2", "x86-64-v3", 8, ("avx2",))
MANIFEST = Manifest(
    key=KEY,
    model_name="double",
    batched=True,
    inputs=(TensorSpec("x", "FP32", (-1, 4), 16),),
    outputs=(TensorSpec("y", "FP32", (-1, 4), 16),),
    layers=(
        Layer(
            name="layer",
            operator="Mul",
            shape="4",
            arguments=(
                BufferRef(MemorySpace.INPUT, 0),
                BufferRef(MemorySpace.WEIGHTS, 64),
                BufferRef(MemorySpace.OUTPUT, 0),
            ),
            versions=(Version("k0", 1, "mul", batch=BatchKernel("b0", 8, 1, "mul of rows")),),
            flops=4,
            bytes=48,
            max_ranks=1,
        ),
    ),
    arena_bytes=64,
    target=TARGET,
    files={},
    phase_us={"read": 3},
)


def write(folder: Path, kernels: bytes = b"\x7fELF") -> Manifest:
    with ArtifactWriter(folder) as writer:
        assert writer.append_weights(bytes(range(100))) == 0
        assert writer.append_weights(b"abc") == 128
        writer.kernels_path.write_bytes(kernels)
        return writer.commit(MANIFEST)


def change(folder: Path, **fields: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = write(tmp_path / KEY)
    assert read_manifest(tmp_path / KEY) == verify(tmp_path / KEY) == written
    assert replace(written, files={}) == MANIFEST
    assert isinstance(written.layers[0].arguments[0].space, MemorySpace)
    assert written.files["weights.bin"].size_bytes == 192
    assert (tmp_path / KEY / "weights.bin").read_bytes()[:128] == bytes(range(100)) + bytes(28)
    assert [path.name for path in tmp_path.iterdir()] == [KEY]


def test_weights_are_never_empty(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / KEY) as writer:
        writer.kernels_path.write_bytes(b"k")
        layer = replace(
            MANIFEST.layers[0], arguments=(BufferRef(MemorySpace.INPUT, 0), BufferRef(MemorySpace.OUTPUT, 0))
        )
        writer.commit(replace(MANIFEST, layers=(layer,)))
    assert (tmp_path / KEY / "weights.bin").stat().st_size == 64


def test_a_full_disk_has_a_name(tmp_path: Path) -> None:
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with full, pytest.raises(OSError, match="No space left") as raised, ArtifactWriter(tmp_path / KEY):
        full.write(b"0")
    assert raised.value.filename == str(tmp_path)


def test_nothing_appears_without_a_commit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ArtifactWriter(tmp_path / KEY) as writer:
        writer.append_weights(b"abc")
        raise RuntimeError
    with pytest.raises(ArtifactError), ArtifactWriter(tmp_path / KEY) as writer:
        writer.kernels_path.write_bytes(b"k")
        writer.commit(replace(MANIFEST, arena_bytes=-64))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"format_version": 1}, "format version 1 instead of 12"),
        ({"key": "../../etc"}, "hex"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"arena_bytes": "64"}, "manifest.arena_bytes: expected `int`, got `str`"),
        ({"arena_bytes": True}, "arena_bytes"),
        ({"arena_bytes": 65}, "aligned"),
        ({"batched": 1}, "manifest.batched: expected `bool`, got `int`"),
        ({"engine": "steam"}, "manifest.engine: invalid enum value 'steam'"),
        ({"engine": 1}, "manifest.engine: "),
        ({"engine": "onnxruntime"}, "reason"),
        ({"engine": "onnxruntime", "fallback_reason": "odd"}, "files"),
        ({"fallback_reason": "odd"}, "reason"),
        ({"layers": []}, "0 layers"),
        ({"inputs": []}, "0 inputs"),
        ({"files": {}}, "files"),
        ({"target": {"name": "avx2"}}, "manifest.target: object missing required field `cpu`"),
        ({"outputs": None}, "manifest.outputs: expected `array`, got `null`"),
        ({"pass_layers": -1}, "passes of -1 layers"),
        ({"pass_layers": 1 << 12}, "passes of 4096 layers"),
        ({"pass_rows": 0}, "passes of 0 rows"),
        ({"tail": True}, "the tail is no island"),
    ],
)
def test_a_wrong_manifest_is_refused(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    write(tmp_path / KEY)
    change(tmp_path / KEY, **fields)
    with pytest.raises(ArtifactError, match=word):
        read_manifest(tmp_path / KEY)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("arguments", 0, "offset_bytes"), 16),
        (("arguments", 0, "offset_bytes"), -4),
        (("arguments", 0, "index"), 1),
        (("arguments", 0, "space"), 7),
        (("arguments", 1, "offset_bytes"), 192),
        (("arguments", 0), {"space": 1, "offset_bytes": 64, "index": 0}),
        (("versions", 0, "tasks"), 0),
        (("versions", 0, "symbol"), "k0; rm"),
        (("versions", 0, "batch", "tasks"), 0),
        (("versions", 0, "batch", "symbol"), ""),
        (("versions", 0, "batch", "rows"), 0),
        (("versions", 0, "batch"), []),
        (("row_ns",), -1),
        (("versions",), []),
        (("arguments",), [{"space": 1, "offset_bytes": 0, "index": 0}] * 9),
        (("max_ranks",), 0),
    ],
)
def test_a_layer_cannot_reach_outside(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    write(tmp_path / KEY)
    layers = json.loads((tmp_path / KEY / "manifest.json").read_text())["layers"]
    target = layers[0]
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    change(tmp_path / KEY, layers=layers)
    with pytest.raises(ArtifactError, match="manifest"):
        read_manifest(tmp_path / KEY)


def test_an_output_that_no_layer_writes_is_refused(tmp_path: Path) -> None:
    """It would show a client what lay in that memory before."""
    write(tmp_path / KEY)
    layers = json.loads((tmp_path / KEY / "manifest.json").read_text())["layers"]
    for layer in layers:
        layer["arguments"] = [item for item in layer["arguments"] if item["space"] != MemorySpace.OUTPUT]
    change(tmp_path / KEY, layers=layers)
    with pytest.raises(ArtifactError, match="no layer writes output 'y'"):
        read_manifest(tmp_path / KEY)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    match how:
        case "cut":
            path.write_bytes(content[:-1])
        case "flip":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "missing":
            path.unlink()
        case "rubbish":
            path.write_bytes(b"[" * 100_000)


@pytest.mark.parametrize("how", ["cut", "flip", "missing", "rubbish"])
@pytest.mark.parametrize("file", ["manifest.json", "weights.bin", "kernels.so"])
def test_cache_notices_damage_and_makes_room(tmp_path: Path, file: str, how: str) -> None:
    cache = Cache(tmp_path)
    assert cache.lookup(KEY) is None
    written = write(cache.folder(KEY))
    assert cache.lookup(KEY) == written
    damage(cache.folder(KEY) / file, how)
    assert cache.lookup(KEY) is None
    assert list(tmp_path.iterdir()) == []
    assert write(cache.folder(KEY)) == cache.lookup(KEY)


def test_cache_notices_an_artifact_under_another_name(tmp_path: Path) -> None:
    write(tmp_path / ("f" * 64))
    assert Cache(tmp_path).lookup("f" * 64) is None


def test_two_writers_race_safely(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / KEY) as first, ArtifactWriter(tmp_path / KEY) as second:
        for writer in (first, second):
            writer.append_weights(bytes(128))
            writer.kernels_path.write_bytes(b"k")
        assert first.commit(MANIFEST) == second.commit(MANIFEST)
    assert [path.name for path in tmp_path.iterdir()] == [KEY]
    verify(tmp_path / KEY)


def _hold(root: Path, ready: Any) -> None:
    with Cache(root).lock(KEY):
        writer = ArtifactWriter(root / KEY)
        writer.append_weights(b"abc")
        ready.set()
        threading.Event().wait(60)


def test_lock_of_a_killed_process_is_free_and_its_rubbish_removed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    try:
        assert ready.wait(30)
        assert len(list(tmp_path.glob(".*"))) == 1
    finally:
        holder.kill()
        holder.join(30)
    with Cache(tmp_path).lock(KEY):
        assert list(tmp_path.glob(".*")) == []


def test_lock_waits_for_its_holder(tmp_path: Path) -> None:
    order = []

    def wait() -> None:
        with Cache(tmp_path).lock(KEY):
            order.append("second")

    with Cache(tmp_path).lock(KEY):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join(30)
    assert order == ["first", "second"]


def test_key_depends_on_bytes_compiler_target_and_dimensions(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"model")
    b.write_bytes(b"data")
    keys = {
        cache_key([a], "1", TARGET, {}),
        cache_key([b], "1", TARGET, {}),
        cache_key([a, b], "1", TARGET, {}),
        cache_key([a], "2", TARGET, {}),
        cache_key([a], "1", replace(TARGET, lanes=16), {}),
        cache_key([a], "1", TARGET, {"S": 1}),
        cache_key([a], "1", TARGET, {"S": 2, "T": 1}),
    }
    assert len(keys) == 7
    assert cache_key([a], "1", TARGET, {}) in keys
    assert cache_key([a], "1", TARGET, {"T": 1, "S": 2}) in keys


@pytest.mark.parametrize("name", ["", "manifest.json", "kernels.so", "weights.bin"])
def test_what_others_may_have_written_is_not_loaded(tmp_path: Path, name: str) -> None:
    cache = Cache(tmp_path)
    write(cache.folder(KEY))
    path = cache.folder(KEY) / name
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(ArtifactError, match=r"can be written by others \(mode 0\d\d\d\)"):
        read_manifest(cache.folder(KEY))
    assert cache.lookup(KEY) is None
    assert not cache.folder(KEY).exists()  # so that it is made again


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_not_loaded(tmp_path: Path) -> None:
    write(tmp_path / KEY)
    os.chown(tmp_path / KEY / "kernels.so", 12345, -1)
    with pytest.raises(ArtifactError, match=r"kernels\.so belongs to user 12345"):
        read_manifest(tmp_path / KEY)


def test_an_artifact_is_closed_to_the_group_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        write(tmp_path / KEY)
    finally:
        os.umask(before)
    assert read_manifest(tmp_path / KEY).key == KEY


def test_default_cache_dir_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "gangway"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_dir() == Path.home() / ".cache" / "gangway"


def test_the_reader_loads_no_heavy_module() -> None:
    heavy = {"google", "numpy", "onnx", "rich", "tvm"}
    program = f"import sys, gangway.artifact.reader; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


def whole_manifest(**fields: Any) -> Manifest:
    layer = replace(MANIFEST.layers[0], arguments=(), versions=(Version("k0", 1, "mul"),), flops=0, bytes=0)
    reason = {"engine": Engine.ONNXRUNTIME, "fallback_reason": "odd"}
    return replace(MANIFEST, **{"layers": (layer,), "arena_bytes": 0, **reason, **fields})


def write_whole(folder: Path, source: Path, **fields: Any) -> Manifest:
    (source / "deep").mkdir(exist_ok=True)
    (source / "net.onnx").write_bytes(b"graph")
    (source / "deep" / "data.bin").write_bytes(b"weights")
    with OnnxArtifactWriter(folder) as writer:
        writer.copy(source / "net.onnx", ["deep/data.bin"])
        return writer.commit(whole_manifest(**fields))


def test_an_artifact_for_onnxruntime_holds_the_model(tmp_path: Path) -> None:
    written = write_whole(tmp_path / "cache" / KEY, tmp_path)
    assert verify(tmp_path / "cache" / KEY) == written
    assert {name: spec.size_bytes for name, spec in written.files.items()} == {
        "onnx/model.onnx": 5,
        "onnx/deep/data.bin": 7,
    }
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [KEY]


@pytest.mark.parametrize("how", ["cut", "flip", "missing"])
@pytest.mark.parametrize("file", ["onnx/model.onnx", "onnx/deep/data.bin"])
def test_cache_notices_damage_to_a_model_for_onnxruntime(tmp_path: Path, file: str, how: str) -> None:
    cache = Cache(tmp_path / "cache")
    written = write_whole(cache.folder(KEY), tmp_path)
    assert cache.lookup(KEY) == written
    damage(cache.folder(KEY) / file, how)
    assert cache.lookup(KEY) is None
    assert list(cache.root.iterdir()) == []


@pytest.mark.parametrize("name", ["../data.bin", "/etc/passwd", "deep/../../x", "./model.onnx"])
def test_no_weights_are_taken_from_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.onnx").write_bytes(b"graph")
    (tmp_path / "model" / "x").mkdir(parents=True)
    with pytest.raises(ValueError, match="not below"), OnnxArtifactWriter(tmp_path / "cache" / KEY) as writer:
        writer.copy(tmp_path / "model.onnx", [name])
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"arena_bytes": 64}, "arena"),
        ({"layers": MANIFEST.layers}, "not that of onnxruntime"),
        ({"layers": whole_manifest().layers * 2}, "2 layers"),
        ({"fallback_reason": ""}, "reason"),
    ],
)
def test_a_wrong_manifest_for_onnxruntime_is_refused(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ArtifactError, match=word):
        write_whole(tmp_path / "cache" / KEY, tmp_path, **fields)


@pytest.mark.parametrize("name", ["", "onnx", "../onnx/model.onnx", "onnx/../../x", "/onnx/x", "weights.bin"])
def test_a_manifest_names_no_files_elsewhere(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cache" / KEY
    write_whole(folder, tmp_path)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    change(folder, files={**files, name: {"size_bytes": 1, "checksum": ""}})
    with pytest.raises(ArtifactError, match="wrong set of files"):
        read_manifest(folder)


ISLAND = replace(MANIFEST.layers[0], versions=(Version("onnxruntime", 1, "onnxruntime"),), onnx_file="island0.onnx")


def write_island(folder: Path, layer: Layer = ISLAND) -> Manifest:
    with ArtifactWriter(folder) as writer:
        writer.append_weights(bytes(128))
        writer.kernels_path.write_bytes(b"\x7fELF")
        writer.add_island("island0.onnx", b"graph")
        return writer.commit(replace(MANIFEST, layers=(*MANIFEST.layers, layer)))


def test_other_kernels_come_with_the_same_islands(tmp_path: Path) -> None:
    written = write_island(tmp_path / KEY)
    assert written.islands == (ISLAND,)
    other = tmp_path / ("f" * 64)
    with VariantWriter(other, tmp_path / KEY) as writer:
        writer.kernels_path.write_bytes(b"\x7fELF other")
        copied = writer.commit(replace(written, key=other.name))
    assert verify(other) == copied
    assert copied.files["island0.onnx"] == written.files["island0.onnx"]
    (other / "island0.onnx").write_bytes(b"graqh")
    assert Cache(tmp_path).lookup(other.name) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"onnx_file": ""},  # the file has no layer then
        {"onnx_file": "island1.onnx"},
        {"onnx_file": "../island0.onnx"},
        {"onnx_file": "kernels.so"},
        {"versions": (Version("onnxruntime", 2, ""),)},
        {"versions": MANIFEST.layers[0].versions},
        {"versions": ISLAND.versions * 2},
        {"checks": ("odd",)},
        {"arguments": (BufferRef(MemorySpace.WEIGHTS, 0),) * 33},
    ],
)
def test_a_wrong_island_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="manifest"):
        write_island(tmp_path / KEY, replace(ISLAND, **fields))


INSTANCE = {"sizes": [5], "inputs": [[-1, 4]], "outputs": [[-1, 4]], "numbers": [0, 16]}
INSTANCES: dict[str, Any] = {"symbols": ["S"], "kernels": [], "places": [[1, 0, 0], [8, 0, 0]], "each": [INSTANCE]}


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"each": []}, "0 instances"),
        ({"kernels": ["k; rm"]}, "the name of a kernel"),
        ({"places": [[99, 0, 0], [8, 0, 0]]}, "invalid enum value 99"),
        ({"each": [INSTANCE | {"sizes": [5, 6]}]}, "instance 0 has 2 sizes"),
        ({"each": [INSTANCE | {"numbers": [0]}]}, "instance 0 has 1 numbers"),
        ({"each": [INSTANCE | {"numbers": [-4, 16]}]}, "instance 0 has a negative number"),
        ({"each": [INSTANCE | {"numbers": [0, 20]}]}, "instance 0: 'x' has 20 bytes a row"),
        ({"each": [INSTANCE, INSTANCE | {"inputs": [[-1, 4, 1]]}]}, "instance 1 has other ranks"),
    ],
)
def test_a_wrong_instance_is_refused(tmp_path: Path, fields: dict[str, Any], word: str) -> None:
    write(tmp_path / KEY)
    change(tmp_path / KEY, instances=INSTANCES)
    assert read_manifest(tmp_path / KEY).instances
    change(tmp_path / KEY, instances=INSTANCES | fields)
    with pytest.raises(ArtifactError, match=word):
        read_manifest(tmp_path / KEY)
