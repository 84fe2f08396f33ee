"""The command line of `gangway serve`: tritonserver's flags are honoured, accepted, or refused by name."""

import os
import sys
from pathlib import Path

import pytest

from gangway.server.access import Category
from gangway.server.options.command_line import (
    ACCEPTED,
    ACCEPTED_TITLE,
    REFUSED,
    REFUSED_TITLE,
    ServeOptions,
    make_parser,
    parse_options,
)
from gangway.server.options.endpoints import Compression, GrpcOptions, KeepaliveOptions

NEEDED = "--model-repository=."
# What `tritonserver --help` lists, without --help itself (release 2.73).
TRITON = """
id exit-timeout-secs log-verbose model-store model-repository model-load-retry-count model-namespacing
enable-peer-access allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern
grpc-infer-thread-count grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual
grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level grpc-keepalive-time
grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
grpc-max-connection-age-grace grpc-restricted-protocol allow-sagemaker sagemaker-port sagemaker-safe-port-range
sagemaker-thread-count allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model
allow-gpu-metrics backend-directory repoagent-directory cache-directory pinned-memory-pool-byte-size
cuda-memory-pool-byte-size cuda-virtual-address-size min-supported-compute-capability buffer-manager-thread-count
host-policy model-load-gpu-limit strict-model-config response-cache-byte-size trace-file trace-level trace-rate
trace-count trace-log-frequency log-info log-warning log-error log-format log-file exit-on-error
disable-auto-complete-config strict-readiness model-control-mode repository-poll-secs load-model model-config-name
model-load-thread-count allow-http http-address http-port reuse-http-port http-header-forward-pattern
http-thread-count http-restricted-api http-max-input-size allow-metrics allow-cpu-metrics metrics-address
metrics-port metrics-interval-ms metrics-config trace-config backend-config cache-config rate-limit
rate-limit-resource allow-client-shm
""".split()  # noqa: SIM905 - a list of words is easier to compare with the help


def wrong(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What is said of flags that make no sense."""
    with pytest.raises(SystemExit) as left:
        parse_options([NEEDED, *flags])
    assert left.value.code == 2
    return capsys.readouterr().err


def test_every_flag_of_tritonserver_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    words = set(make_parser().format_help(show_all=True).replace(",", " ").split())
    assert [name for name in TRITON if f"--{name}" not in words] == []


def test_the_help_lists_what_has_no_effect_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # nothing is hyphenated
    help_text = " ".join(make_parser().format_help(show_all=True).split())
    accepted, refused = help_text.split(f"{ACCEPTED_TITLE}: ")[1].split(f"{REFUSED_TITLE}: ")
    for flags, part, other in ((ACCEPTED, accepted, refused), (REFUSED, refused, accepted)):
        for flag in flags:
            assert f"{flag.name} {flag.metavar} {flag.reason}" in part
            assert f"{flag.name} " not in other


def test_all_flags_stand_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "reference" / "flags.md").read_text()
    actions = make_parser()._actions
    missing = [name for action in actions for name in action.option_strings if f"`{name}`" not in text]
    assert missing == []


def test_defaults_are_those_of_the_dataclasses() -> None:
    options = parse_options([NEEDED])
    assert options.grpc == GrpcOptions()
    assert options.grpc.keepalive == KeepaliveOptions()
    assert options.logs == ServeOptions().logs
    assert options.warnings == ()


def test_values_of_grpc() -> None:
    options = parse_options(
        [
            NEEDED,
            "--allow-grpc=TRUE",
            "--grpc-port=0",
            "--grpc-address=::1",
            "--reuse-grpc-port=1",
            "--grpc-infer-response-compression-level=Medium",
            "--grpc-restricted-protocol=inference,health:a=b",
            "--grpc-restricted-protocol",
            "trace:c=d",
            "--grpc-max-message-bytes=4096",
            "--grpc-keepalive-time=1",
            "--grpc-keepalive-permit-without-calls=true",
            "--grpc-max-connection-age=2",
            "--grpc-max-connection-age-grace=3",
        ]
    ).grpc
    assert (options.target, options.reuse_port, options.compression) == ("[::1]:0", True, Compression.MEDIUM)
    assert [group.categories for group in options.restrictions.groups] == [
        (Category.INFERENCE, Category.HEALTH),
        (Category.TRACE,),
    ]
    assert options.max_message_bytes == 4096
    keepalive = options.keepalive
    assert (keepalive.time_ms, keepalive.permit_without_calls) == (1, True)
    assert (keepalive.max_connection_age_ms, keepalive.max_connection_age_grace_ms) == (2, 3)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("0.0.0.0", "0.0.0.0:8001"),
        ("::", "[::]:8001"),
        ("ipv6:[::1]", "[::1]:8001"),
        ("ipv4:127.0.0.1", "127.0.0.1:8001"),
        ("unix:/tmp/a socket", "unix:/tmp/a socket"),
    ],
)
def test_addresses(address: str, target: str) -> None:
    assert parse_options([NEEDED, f"--grpc-address={address}"]).grpc.target == target


def test_words_in_capitals_are_taken_as_tritonserver_takes_them() -> None:
    given = ("--model-control-mode=EXPLICIT", "--rate-limit=Execution_Count", "--trace-config=mode=OpenTelemetry")
    options = parse_options([NEEDED, *given, "--log-info=FALSE", "--grpc-infer-response-compression-level=HIGH"])
    assert (options.repository.mode, options.traces.mode) == ("explicit", "opentelemetry")
    assert options.models.rates.enabled and not options.logs.info
    assert options.grpc.compression is Compression.HIGH


def test_grpc_can_be_switched_off() -> None:
    assert parse_options([NEEDED, "--allow-grpc=false"]).grpc.target == ""


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--allow-grpc=yes", "argument --allow-grpc: 'yes' is neither true nor false"),
        ("--grpc-port=-1", "argument --grpc-port: -1 is not a port"),
        ("--grpc-port=x", "argument --grpc-port: x is not a port"),
        ("--grpc-header-forward-pattern=(", "argument --grpc-header-forward-pattern: '(' is no regular expression"),
        ("--http-header-forward-pattern=x-[", "argument --http-header-forward-pattern: 'x-[' is no regular expression"),
        ("--grpc-address=unix:" + "x" * 108, "argument --grpc-address: the path of a socket has 1 to 107 bytes"),
        ("--grpc-address=unix:", "argument --grpc-address: the path of a socket"),
        ("--grpc-keepalive-time=0", "argument --grpc-keepalive-time: 0 is not from 1 to 2147483647"),
        ("--grpc-keepalive-timeout=2147483648", "argument --grpc-keepalive-timeout: 2147483648 is not from 1"),
        ("--grpc-http2-max-ping-strikes=-1", "argument --grpc-http2-max-ping-strikes: -1 is not from 0"),
        ("--grpc-http2-max-pings-without-data=1.5", "'1.5' is no whole number"),
        ("--grpc-max-connection-age=0", "argument --grpc-max-connection-age: 0 is not from 1"),
        ("--grpc-max-message-bytes=10", "argument --grpc-max-message-bytes: 10 is not from 1024"),
        ("--grpc-infer-response-compression-level=best", "'best' is none of none, low, medium, high"),
        ("--grpc-restricted-protocol=health", "argument --grpc-restricted-protocol: expected CATEGORY,...:KEY=VALUE"),
        ("--grpc-restricted-protocol=wealth:a=b", "unknown category 'wealth'"),
        ("--grpc-use-ssl=true", "argument --grpc-server-cert: is needed for --grpc-use-ssl"),
        ("--profile-seconds=-1", "argument --profile-seconds: -1 is no time"),
        ("--exit-timeout-secs=inf", "argument --exit-timeout-secs: inf is no time"),
        ("--numa-nodes=4095;0", "argument --numa-nodes: each of the cores "),
        ("--numa-nodes=a", "argument --numa-nodes: cores must be 'all' or a list"),
        ("--id=", "argument --id: a name has 1 to 256 characters"),
        ("--log-verbose=-1", "argument --log-verbose: -1 is not from 0"),
        ("--min-supported-compute-capability=x", "argument --min-supported-compute-capability: invalid float value"),
        ("--host-policy=a,numa-node=0", "argument --host-policy: is not supported: one worker is pinned to each core"),
        ("--model-namespacing=true", "argument --model-namespacing: is not supported: a model's name is unique"),
        ("--allow-vertex-ai=1", "argument --allow-vertex-ai: is not supported: Vertex AI's protocol is not served"),
        ("--trace-rate=5", "argument --trace-rate: is not supported: deprecated; use --trace-config=rate=N"),
        ("--model-config-name=a b", "argument --model-config-name: 'a b' is no name of a file without .pbtxt"),
        ("--model-config-name=../x", "argument --model-config-name: '../x' is no name of a file without .pbtxt"),
        ("--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("--backend-config=default-max-batch-size", "expected '[BACKEND,]SETTING=VALUE'"),
        ("--backend-config=default-max-batch-size=-1", "-1 is not from 0"),
        ("--backend-config=python,execution-env-path=/no/such", "/no/such does not exist"),
        ("surplus", "argument MODELS: surplus does not exist"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flag: str, said: str) -> None:
    text = wrong(capsys, flag)
    assert said in text
    assert len(text.splitlines()) == 2  # not the whole usage


def test_batches_can_be_switched_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options([NEEDED]).models.batching
    assert parse_options([NEEDED, "--batching=auto"]).models.batching
    assert not parse_options([NEEDED, "--batching=off"]).models.batching
    assert "argument --batching: invalid choice: 'on'" in wrong(capsys, "--batching=on")


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ([], 4),
        (["default-max-batch-size=8"], 8),
        (["onnxruntime,default-max-batch-size=0", "default-max-batch-size=8"], 0),
        (["tensorflow,default-max-batch-size=16", "default-max-batch-size=8", "default-max-batch-size=9"], 9),
    ],
)
def test_the_default_batch(settings: list[str], size: int) -> None:
    options = parse_options([NEEDED, *(f"--backend-config={setting}" for setting in settings)])
    assert options.models.default_max_batch_size == size
    ignored = [setting for setting in settings if setting.startswith("tensorflow")]
    reason = "has no effect: no model is executed by tensorflow"
    assert options.warnings == tuple(f"--backend-config={setting.split('=')[0]} {reason}" for setting in ignored)


MEMORY = "shared memory of Python models grows with their tensors"
CORES = "the scheduler chooses the cores of each request"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [  # what Triton's pages document, and what people write beside it
        ("backend-directory=/opt/tritonserver/backends", "no shared libraries are loaded"),
        ("min-compute-capability=6.0", "no GPU is used"),
        ("python,shm-default-byte-size=16777216", MEMORY),
        ("python,shm-growth-byte-size=8388608", MEMORY),
        ("python,shm-region-prefix-name=first_", "shared memory of Python models has no names, so servers share none"),
        ("python,thread-pool-size=4", "instances of Python models have no pool of threads"),
        ("onnxruntime,enable-global-threadpool=1", CORES),
        ("onnxruntime,intra_op_thread_count=1", CORES),
        ("onnxruntime,inter_op_thread_count=1", CORES),
        ("tensorflow,version=2", "no model is executed by tensorflow"),
        ("tensorrt,coalesce-request-input=true", "no model is executed by tensorrt"),
        ("tensorrt,plugins=/a.so;/b.so", "no model is executed by tensorrt"),
        ("openvino,version=2024_0", "no model is executed by openvino"),
        ("pytorch,version=2", "no model is executed by pytorch"),
        ("python,sh-timeout=3", "no setting has this name"),
        ("onnxruntime,default_max_batchsize=8", "no setting has this name; did you mean 'default-max-batch-size'?"),
        ("python,stub-timeout-seconds=90", ""),
        ("onnxruntime,default-max-batch-size=8", ""),
    ],
)
def test_every_setting_of_a_backend_starts_and_says_what_becomes_of_it(setting: str, reason: str) -> None:
    name = setting.partition("=")[0]
    expected = (f"--backend-config={name} has no effect: {reason}",) if reason else ()
    assert parse_options([NEEDED, f"--backend-config={setting}"]).warnings == expected


def test_how_long_python_models_may_take(capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--backend-config=python,stub-timeout-seconds="
    assert parse_options([NEEDED]).models.python_start_seconds == 600
    options = parse_options([NEEDED, f"{flag}5", f"{flag}90"])
    assert (options.models.python_start_seconds, options.warnings) == (90, ())
    assert "0 is not from 1 to 86400" in wrong(capsys, f"{flag}0")


def test_the_environment_of_python_models() -> None:
    assert parse_options([NEEDED]).models.python_environment == ""
    flag = "--backend-config=python,execution-env-path="
    options = parse_options([NEEDED, f"{flag}/", f"{flag}{sys.executable}", "--backend-config=execution-env-path=/"])
    assert options.models.python_environment == sys.executable
    assert [warning.split()[0] for warning in options.warnings] == ["--backend-config=execution-env-path"]


def test_a_category_in_two_restrictions(capsys: pytest.CaptureFixture[str]) -> None:
    flag = "--grpc-restricted-protocol=health:key=s3cret"
    text = wrong(capsys, flag, flag)
    assert "argument --grpc-restricted-protocol: 'health' is given more than once" in text
    assert "s3cret" not in text


def test_restrictions_are_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("health:a=s3cret\n\n trace,logging:b=0ther \n")
    options = parse_options([NEEDED, f"--grpc-restricted-protocol=@{keys}", "--http-restricted-api=health:a=b"])
    assert [(group.key, group.value) for group in options.grpc.restrictions.groups] == [("a", "s3cret"), ("b", "0ther")]
    visible = [warning for warning in options.warnings if "every user of this machine can read the key" in warning]
    assert [warning.partition(":")[0] for warning in visible] == ["--http-restricted-api"]
    keys.write_text("s3cret")
    said = wrong(capsys, f"--grpc-restricted-protocol=@{keys}")
    assert "argument --grpc-restricted-protocol: expected CATEGORY,...:KEY=VALUE" in said and "s3cret" not in said
    assert "/no/file cannot be read" in wrong(capsys, "--grpc-restricted-protocol=@/no/file")


def test_a_cache_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = parse_options([NEEDED, f"--cache-dir={tmp_path}/a/b"]).general.cache_dir
    assert made.is_dir() and not made.stat().st_mode & 0o022
    made.chmod(0o775)
    said = wrong(capsys, f"--cache-dir={made}")
    assert f"argument --cache-dir: {made} can be written by others (mode 0775)" in said
    assert f"as --cache-dir={made}/gangway" in said and len(said.splitlines()) == 2
    assert "argument --cache-dir: /proc/self cannot be used: it cannot be written" in wrong(
        capsys, "--cache-dir=/proc/self"
    )
    assert "argument --cache-dir: /dev/null cannot be used: File exists" in wrong(capsys, "--cache-dir=/dev/null")


def test_a_user_without_home_is_asked_for_a_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert "argument --cache-dir: is needed: this user has no home directory" in wrong(capsys)


def test_accepted_flags_are_remarked_upon_once() -> None:
    flags = ["--cuda-memory-pool-byte-size=0:1", "--cuda-memory-pool-byte-size=1:1", "--backend-directory", "/b"]
    assert parse_options([NEEDED, *flags]).warnings == (
        "--cuda-memory-pool-byte-size has no effect: no GPU is used",
        "--backend-directory has no effect: no shared libraries are loaded",
    )


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_an_address_may_have_brackets(address: str) -> None:
    options = parse_options([NEEDED, f"--http-address={address}", f"--grpc-address={address}"])
    targets = [options.http.target, options.grpc.target, options.metrics.target]
    assert targets == ["[::1]:8000", "[::1]:8001", "[::1]:8002"]
    named = parse_options([NEEDED, f"--metrics-address={address}", "--metrics-port=0"])
    assert named.metrics.target == "[::1]:0"


def test_a_restriction_of_one_protocol_only_is_remarked_upon(tmp_path: Path) -> None:
    (tmp_path / "grpc").write_text("health,trace:a=1")
    (tmp_path / "http").write_text("trace,logging:b=2")
    grpc, http = f"--grpc-restricted-protocol=@{tmp_path}/grpc", f"--http-restricted-api=@{tmp_path}/http"
    said = "{} restricts {}, which {} leaves open to everyone: {} restricts it"
    flags = ("--grpc-restricted-protocol", "--http-restricted-api")
    only_grpc = said.format(flags[0], "health, trace", "HTTP", flags[1])
    assert parse_options([NEEDED, grpc]).warnings == (only_grpc,)
    assert parse_options([NEEDED, grpc, http]).warnings == (
        said.format(flags[0], "health", "HTTP", flags[1]),
        said.format(flags[1], "logging", "gRPC", flags[0]),
    )
    assert parse_options([NEEDED, grpc, "--allow-http=false"]).warnings == ()


def test_what_asks_for_nothing_is_no_mistake() -> None:
    flags = ["--allow-sagemaker=false", "--allow-vertex-ai=0", "--model-namespacing=False", "--strict-model-config=0"]
    assert parse_options([NEEDED, *flags]).warnings == ()


@pytest.mark.parametrize("flag", ["--log-file", "--access-log"])
def test_a_pipe_that_nobody_reads_is_no_log(capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "pipe that nobody reads" in wrong(capsys, f"{flag}={tmp_path / 'pipe'}")
