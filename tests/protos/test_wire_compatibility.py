"""Our .proto files describe exactly what Triton's public client speaks."""

import subprocess
import sys

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FileDescriptorProto

from gangway.protos import StatusCode

FILES = {"grpc_service_pb2": "service_pb2", "model_config_pb2": "model_config_pb2"}

# Both packages share one descriptor pool within a process, so each side describes itself in a process of its own.
DESCRIBE = "import sys; from {package} import {module} as m; sys.stdout.buffer.write(m.DESCRIPTOR.serialized_pb)"


def describe(package: str, module: str) -> FileDescriptorProto:
    code = DESCRIBE.format(package=package, module=module)
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60).stdout
    return FileDescriptorProto.FromString(output)


def flatten(prefix: str, message: DescriptorProto, found: dict[str, object]) -> None:
    """Record each fact of the interface under a name of its own, so that a difference says where it is."""
    name = f"{prefix}.{message.name}"
    found[name] = ("message", message.options.map_entry, [oneof.name for oneof in message.oneof_decl])
    for order, field in enumerate(message.field):
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        packed = field.options.packed if field.options.HasField("packed") else None
        facts = (order, field.number, field.label, field.type, field.type_name, field.json_name, oneof, packed)
        found[f"{name}.{field.name}"] = (*facts, field.proto3_optional, field.default_value)
    for enum in message.enum_type:
        flatten_enum(name, enum, found)
    for nested in message.nested_type:
        flatten(name, nested, found)


def flatten_enum(prefix: str, enum: EnumDescriptorProto, found: dict[str, object]) -> None:
    for order, value in enumerate(enum.value):
        found[f"{prefix}.{enum.name}.{value.name}"] = (order, value.number)


def facts(file: FileDescriptorProto) -> dict[str, object]:
    found: dict[str, object] = {"file": (file.name, file.package, file.syntax, list(file.dependency))}
    for message in file.message_type:
        flatten(file.package, message, found)
    for enum in file.enum_type:
        flatten_enum(file.package, enum, found)
    for service in file.service:
        for method in service.method:
            streams = (method.client_streaming, method.server_streaming)
            types = (method.input_type, method.output_type)
            found[f"{service.name}.{method.name}"] = (*types, *streams, method.HasField("options"))
    return found


@pytest.mark.parametrize(("ours", "theirs"), FILES.items())
def test_every_message_field_and_enum_equals_the_public_clients(ours: str, theirs: str) -> None:
    our_file, their_file = describe("gangway.protos", ours), describe("tritonclient.grpc", theirs)
    our_facts, their_facts = facts(our_file), facts(their_file)
    assert our_facts == their_facts
    assert len(their_facts) > 100
    assert our_file == their_file


RPCS = {
    *("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer", "ModelStreamInfer"),
    *("ModelConfig", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"),
    *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
    *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
    *("TraceSetting", "LogSettings"),
}


def service_methods(file: FileDescriptor, name: str) -> dict[str, descriptor_pb2.MethodDescriptorProto]:
    proto = FileDescriptorProto.FromString(file.serialized_pb)
    return {method.name: method for service in proto.service if service.name == name for method in service.method}


def test_all_methods_are_declared_with_their_streams() -> None:
    from gangway.protos import grpc_service_pb2

    methods = service_methods(grpc_service_pb2.DESCRIPTOR, "GRPCInferenceService")
    assert set(methods) == RPCS
    assert len(RPCS) == 20
    for name, method in methods.items():
        response = "ModelStreamInferResponse" if name == "ModelStreamInfer" else f"{name}Response"
        request = "ModelInferRequest" if name == "ModelStreamInfer" else f"{name}Request"
        assert (method.input_type, method.output_type) == (f".inference.{request}", f".inference.{response}")
        assert method.client_streaming == method.server_streaming == (name == "ModelStreamInfer")


def test_health_service_is_grpcs_own() -> None:
    from gangway.protos import health_pb2

    assert health_pb2.DESCRIPTOR.package == "grpc.health.v1"
    assert set(service_methods(health_pb2.DESCRIPTOR, "Health")) == {"Check", "Watch"}
    statuses = {"UNKNOWN": 0, "SERVING": 1, "NOT_SERVING": 2, "SERVICE_UNKNOWN": 3}
    assert dict(health_pb2.HealthCheckResponse.ServingStatus.items()) == statuses
    response = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert response.SerializeToString() == b"\x08\x01"
    assert health_pb2.HealthCheckRequest(service="x").SerializeToString() == b"\x0a\x01x"


OURS = "from gangway.protos import grpc_service_pb2 as ours, model_config_pb2"
THEIRS = "import tritonclient.grpc; from tritonclient.grpc import service_pb2 as theirs"
EXCHANGE = """
request = ours.ModelInferRequest(model_name="m", raw_input_contents=[b"xy"])
request.parameters["timeout"].int64_param = 5
data = request.SerializeToString()
assert theirs.ModelInferRequest.FromString(data).SerializeToString() == data
"""


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours first", "theirs first"])
def test_both_modules_load_in_one_process(order: tuple[str, str]) -> None:
    code = "\n".join([*order, EXCHANGE])
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_statuses_are_grpc_s() -> None:
    assert {code.name: code.value for code in StatusCode} == {code.name: code.value[0] for code in grpc.StatusCode}
