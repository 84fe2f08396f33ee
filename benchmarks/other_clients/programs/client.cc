// gRPC's C core by its C++ interface against Gangway: `client FOLDER ADDRESS [ROOT CERTIFICATE KEY]`. See __main__.py.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Clock = std::chrono::system_clock;
using Milliseconds = std::chrono::milliseconds;

const std::string kService = "/inference.GRPCInferenceService/";
const auto kWait = std::chrono::seconds(60);
const int kConcurrent = 200, kRounds = 3;
std::string folder;

std::string Whole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string File(const std::string& name) { return Whole(folder + "/" + name); }

grpc::ByteBuffer Buffer(const std::string& text) {
  grpc::Slice slice(text);
  return {&slice, 1};
}

std::string Text(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string text;
  if (!buffer.Dump(&slices).ok()) return text;
  for (const auto& slice : slices) text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return text;
}

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (char letter : text) {
    if (letter == '"' || letter == '\\') quoted += '\\';
    quoted += letter == '\n' ? ' ' : letter;
  }
  return quoted + "\"";
}

void Ask(const std::string& what) {
  std::cout << "{\"ask\": " << Quoted(what) << "}" << std::endl;
  std::string line;
  std::getline(std::cin, line);
}

// One call and what it waits with. Problems are texts; none is empty.
class Call {
 public:
  explicit Call(grpc::GenericStub& stub, Milliseconds limit = kWait) : stub_(stub) {
    context_.set_deadline(Clock::now() + limit);
  }
  ~Call() {
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  grpc::ClientContext& context() { return context_; }

  grpc::Status Infer(const std::string& request, std::string* answer) {
    auto reader = stub_.PrepareUnaryCall(&context_, kService + "ModelInfer", Buffer(request), &queue_);
    grpc::ByteBuffer buffer;
    grpc::Status status;
    reader->StartCall();
    reader->Finish(&buffer, &status, this);
    Waited();
    if (status.ok()) *answer = Text(buffer);
    return status;
  }
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> Stream() {
    auto stream = stub_.PrepareCall(&context_, kService + "ModelStreamInfer", &queue_);
    stream->StartCall(this);
    Waited();
    return stream;
  }
  bool Waited() {
    void* tag;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

 private:
  grpc::GenericStub& stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
};

std::string Problem(const grpc::Status& status) {
  return status.ok() ? "" : std::to_string(status.error_code()) + " " + status.error_message();
}

std::string Finished(Call& call, const std::string& name) {
  std::string answer;
  const grpc::Status status = call.Infer(File(name + ".request"), &answer);
  if (!status.ok()) return Problem(status);
  return answer == File(name + ".answer") ? "" : "another answer of " + std::to_string(answer.size()) + " bytes";
}

std::string Answered(grpc::GenericStub& stub, const std::string& name) {
  Call call(stub);
  return Finished(call, name);
}

std::string Refused(const grpc::Status& status, grpc::StatusCode code, const std::string& text = "") {
  const bool as_wanted = status.error_code() == code && status.error_message().find(text) != std::string::npos;
  return as_wanted ? "" : "not " + std::to_string(code) + " " + text + ", but " + Problem(status);
}

std::string Compressed(grpc::GenericStub& stub) {
  Call call(stub);
  call.context().set_compression_algorithm(GRPC_COMPRESS_GZIP);
  return Finished(call, "large");
}

std::string Streamed(grpc::GenericStub& stub) {
  Call call(stub);
  auto stream = call.Stream();
  const std::string request = File("small.request"), wanted = File("stream.answer");
  for (int round = 0; round < kRounds; round++) {
    grpc::ByteBuffer answer;
    stream->Write(Buffer(request), &call);
    if (!call.Waited()) return "not written";
    stream->Read(&answer, &call);
    if (!call.Waited()) break;
    if (Text(answer) != wanted) return "another answer";
  }
  grpc::Status status;
  grpc::ByteBuffer more;
  stream->WritesDone(&call);
  call.Waited();
  stream->Read(&more, &call);
  if (call.Waited()) return "one answer too many";
  stream->Finish(&status, &call);
  call.Waited();
  return Problem(status);
}

std::string Late(grpc::GenericStub& stub) {
  Call call(stub, Milliseconds(300));
  std::string answer;
  return Refused(call.Infer(File("slow.request"), &answer), grpc::DEADLINE_EXCEEDED);
}

std::string GivenUp(grpc::GenericStub& stub) {
  {
    Call call(stub);
    std::thread other([&call] {
      std::this_thread::sleep_for(Milliseconds(200));
      call.context().TryCancel();
    });
    std::string answer;
    const std::string problem = Refused(call.Infer(File("slow.request"), &answer), grpc::CANCELLED);
    other.join();
    if (!problem.empty()) return problem;
  }
  {
    Call call(stub);
    auto stream = call.Stream();
    stream->Write(Buffer(File("slow.request")), &call);
    call.Waited();
    std::this_thread::sleep_for(Milliseconds(200));
    call.context().TryCancel();
    grpc::Status status;
    stream->Finish(&status, &call);
    call.Waited();
    const std::string problem = Refused(status, grpc::CANCELLED);
    if (!problem.empty()) return problem;
  }
  return Answered(stub, "small");
}

std::string Metadata(grpc::GenericStub& stub) {
  Call call(stub);
  call.context().AddMetadata("x-text", "some text");
  call.context().AddMetadata("x-raw-bin", std::string("\0\xff\n\x80", 4));
  call.context().AddMetadata("x-many", "1");
  call.context().AddMetadata("x-many", "2");
  return Finished(call, "small");
}

std::string Wrong(grpc::GenericStub& stub, const std::string& name, grpc::StatusCode code) {
  Call call(stub);
  std::string answer;
  return Refused(call.Infer(File(name + ".request"), &answer), code, File(name + ".text"));
}

std::string Many(grpc::GenericStub& stub) {
  std::vector<std::string> problems(kConcurrent);
  std::vector<std::thread> threads;
  for (auto& problem : problems) threads.emplace_back([&] { problem = Answered(stub, "small"); });
  for (auto& thread : threads) thread.join();
  for (const auto& problem : problems)
    if (!problem.empty()) return problem;
  return "";
}

std::string Killed(grpc::GenericStub& stub) {
  Ask("kill");
  const auto end = Clock::now() + kWait;
  for (;;) {
    Call call(stub);
    std::string answer;
    const grpc::Status status = call.Infer(File("small.request"), &answer);
    if (status.ok() || Clock::now() > end) return Problem(status);
    std::this_thread::sleep_for(Milliseconds(20));
  }
}

std::string Drained(grpc::GenericStub& stub) {
  std::string problem;
  std::thread other([&] { problem = Answered(stub, "slow"); });
  std::this_thread::sleep_for(Milliseconds(500));
  Ask("drain");
  other.join();
  return problem;
}

}  // namespace

int main(int count, char** arguments) {
  folder = arguments[1];
  auto credentials = grpc::InsecureChannelCredentials();
  grpc::ChannelArguments options;
  if (count > 3) {
    credentials = grpc::SslCredentials({Whole(arguments[3]), Whole(arguments[5]), Whole(arguments[4])});
    options.SetSslTargetNameOverride("localhost");
  }
  options.SetMaxReceiveMessageSize(-1);
  options.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  options.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  grpc::GenericStub stub(grpc::CreateCustomChannel(arguments[2], credentials, options));
  const std::vector<std::pair<std::string, std::function<std::string()>>> checks = {
      {"small", [&] { return Answered(stub, "small"); }},
      {"16 MB", [&] { return Answered(stub, "large"); }},
      {"gzip", [&] { return Compressed(stub); }},
      {"stream", [&] { return Streamed(stub); }},
      {"deadline", [&] { return Late(stub); }},
      {"cancellation", [&] { return GivenUp(stub); }},
      {"metadata", [&] { return Metadata(stub); }},
      {"error", [&] { return Wrong(stub, "unknown", grpc::NOT_FOUND); }},
      {"too large", [&] { return Wrong(stub, "huge", grpc::RESOURCE_EXHAUSTED); }},
      {"200 at a time", [&] { return Many(stub); }},
      {"keepalive", [&] { return Answered(stub, "idle"); }},
      {"front end killed", [&] { return Killed(stub); }},
      {"drained", [&] { return Drained(stub); }},
  };
  for (const auto& check : checks) {
    const std::string problem = check.second();
    std::cout << "{\"check\": " << Quoted(check.first) << ", \"problem\": " << Quoted(problem) << "}" << std::endl;
  }
}
