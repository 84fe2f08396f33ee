// gRPC of Java (Netty's HTTP/2) against Gangway: `java Client FOLDER ADDRESS [ROOT CERTIFICATE KEY]`. See __main__.py.

import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptors;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.netty.GrpcSslContexts;
import io.grpc.netty.NegotiationType;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.ByteArrayInputStream;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Future;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;

public final class Client {
  private static final String SERVICE = "inference.GRPCInferenceService/";
  private static final int CONCURRENT = 200, ROUNDS = 3, WAIT_S = 60;

  /** Messages stay serialised: what is tested is the way that they go. */
  private static final MethodDescriptor.Marshaller<byte[]> AS_IS = new MethodDescriptor.Marshaller<>() {
    @Override public InputStream stream(byte[] value) { return new ByteArrayInputStream(value); }
    @Override public byte[] parse(InputStream stream) {
      try {
        return stream.readAllBytes();
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    }
  };
  private static final MethodDescriptor<byte[], byte[]> INFER = method(MethodType.UNARY, "ModelInfer");
  private static final MethodDescriptor<byte[], byte[]> STREAM = method(MethodType.BIDI_STREAMING, "ModelStreamInfer");

  private interface Check { void run() throws Exception; }

  private final String folder;
  private final ManagedChannel channel;

  private Client(String folder, ManagedChannel channel) {
    this.folder = folder;
    this.channel = channel;
  }

  private static MethodDescriptor<byte[], byte[]> method(MethodType type, String name) {
    return MethodDescriptor.newBuilder(AS_IS, AS_IS).setType(type).setFullMethodName(SERVICE + name).build();
  }

  private byte[] file(String name) throws IOException { return Files.readAllBytes(Path.of(folder, name)); }

  private static void ask(String what) throws IOException {
    System.out.println("{\"ask\": \"" + what + "\"}");
    while (System.in.read() != '\n') {}
  }

  private static CallOptions within(long milliseconds) {
    return CallOptions.DEFAULT.withDeadlineAfter(milliseconds, TimeUnit.MILLISECONDS);
  }

  private void answered(Channel by, CallOptions options, String name) throws IOException {
    byte[] answer = ClientCalls.blockingUnaryCall(by, INFER, options, file(name + ".request"));
    expect(Arrays.equals(answer, file(name + ".answer")), "another answer of " + answer.length + " bytes");
  }

  private void answered(String name) throws IOException { answered(channel, within(WAIT_S * 1000L), name); }

  private static void expect(boolean condition, String what) {
    if (!condition) throw new AssertionError(what);
  }

  private static void refused(Callable<?> asked, Status.Code code, String text) throws Exception {
    Status status = Status.OK;
    try {
      asked.call();
    } catch (StatusRuntimeException error) {
      status = error.getStatus();
    }
    String told = String.valueOf(status.getDescription());
    expect(status.getCode() == code && told.contains(text), "not " + code + " " + text + ", but " + status);
  }

  private StreamObserver<byte[]> stream(LinkedBlockingQueue<Object> answers, CallOptions options) {
    ClientCall<byte[], byte[]> call = channel.newCall(STREAM, options);
    return ClientCalls.asyncBidiStreamingCall(call, new StreamObserver<byte[]>() {
      @Override public void onNext(byte[] answer) { answers.add(answer); }
      @Override public void onError(Throwable error) { answers.add(error); }
      @Override public void onCompleted() { answers.add("end"); }
    });
  }

  private void streamed() throws Exception {
    LinkedBlockingQueue<Object> answers = new LinkedBlockingQueue<>();
    StreamObserver<byte[]> requests = stream(answers, within(WAIT_S * 1000L));
    for (int round = 0; round < ROUNDS; round++) {
      requests.onNext(file("small.request"));
      Object answer = answers.take();
      expect(answer instanceof byte[] bytes && Arrays.equals(bytes, file("stream.answer")), "not " + answer);
    }
    requests.onCompleted();
    Object end = answers.take();
    expect(end.equals("end"), "no end, but " + end);
  }

  private void givenUp() throws Exception {
    Context.CancellableContext context = Context.current().withCancellation();
    CompletableFuture.delayedExecutor(200, TimeUnit.MILLISECONDS).execute(() -> context.cancel(null));
    Callable<byte[]> slow = () -> ClientCalls.blockingUnaryCall(channel, INFER, within(WAIT_S * 1000L), file("slow.request"));
    refused(() -> context.call(slow), Status.Code.CANCELLED, "");
    LinkedBlockingQueue<Object> answers = new LinkedBlockingQueue<>();
    StreamObserver<byte[]> requests = stream(answers, within(WAIT_S * 1000L));
    requests.onNext(file("slow.request"));
    Thread.sleep(200);
    requests.onError(Status.CANCELLED.asRuntimeException());
    Object end = answers.take();
    expect(end instanceof StatusRuntimeException error && error.getStatus().getCode() == Status.Code.CANCELLED, "" + end);
    answered("small");
  }

  private void withMetadata() throws IOException {
    Metadata metadata = new Metadata();
    metadata.put(Metadata.Key.of("x-text", Metadata.ASCII_STRING_MARSHALLER), "some text");
    metadata.put(Metadata.Key.of("x-raw-bin", Metadata.BINARY_BYTE_MARSHALLER), new byte[] {0, -1, 10, -128});
    metadata.put(Metadata.Key.of("x-many", Metadata.ASCII_STRING_MARSHALLER), "1");
    metadata.put(Metadata.Key.of("x-many", Metadata.ASCII_STRING_MARSHALLER), "2");
    Channel by = ClientInterceptors.intercept(channel, MetadataUtils.newAttachHeadersInterceptor(metadata));
    answered(by, within(WAIT_S * 1000L), "small");
  }

  private void wrong(String name, Status.Code code) throws Exception {
    String text = Files.readString(Path.of(folder, name + ".text"));
    refused(() -> ClientCalls.blockingUnaryCall(channel, INFER, within(WAIT_S * 1000L), file(name + ".request")), code, text);
  }

  private void many() throws Exception {
    List<Future<byte[]>> calls = new ArrayList<>();
    for (int number = 0; number < CONCURRENT; number++)
      calls.add(ClientCalls.futureUnaryCall(channel.newCall(INFER, within(WAIT_S * 1000L)), file("small.request")));
    for (Future<byte[]> call : calls) expect(Arrays.equals(call.get(), file("small.answer")), "another answer");
  }

  private void killed() throws Exception {
    ask("kill");
    for (long end = System.nanoTime() + WAIT_S * 1_000_000_000L; ; Thread.sleep(20)) {
      try {
        answered("small");
        return;
      } catch (StatusRuntimeException error) {
        if (System.nanoTime() > end) throw error;
      }
      channel.resetConnectBackoff();
    }
  }

  private void drained() throws Exception {
    ClientCall<byte[], byte[]> call = channel.newCall(INFER, within(WAIT_S * 1000L));
    Future<byte[]> slow = ClientCalls.futureUnaryCall(call, file("slow.request"));
    Thread.sleep(500);
    ask("drain");
    expect(Arrays.equals(slow.get(), file("slow.answer")), "another answer");
  }

  private Map<String, Check> checks() throws IOException {
    Map<String, Check> checks = new LinkedHashMap<>();
    checks.put("small", () -> answered("small"));
    checks.put("16 MB", () -> answered("large"));
    checks.put("gzip", () -> answered(channel, within(WAIT_S * 1000L).withCompression("gzip"), "large"));
    checks.put("stream", this::streamed);
    checks.put("deadline", () -> refused(
        () -> ClientCalls.blockingUnaryCall(channel, INFER, within(300), file("slow.request")), Status.Code.DEADLINE_EXCEEDED, ""));
    checks.put("cancellation", this::givenUp);
    checks.put("metadata", this::withMetadata);
    checks.put("error", () -> wrong("unknown", Status.Code.NOT_FOUND));
    checks.put("too large", () -> wrong("huge", Status.Code.RESOURCE_EXHAUSTED));
    checks.put("200 at a time", this::many);
    checks.put("keepalive", () -> answered("idle"));
    checks.put("front end killed", this::killed);
    checks.put("drained", this::drained);
    return checks;
  }

  public static void main(String[] arguments) throws Exception {
    NettyChannelBuilder builder = NettyChannelBuilder.forTarget(arguments[1]).maxInboundMessageSize(64 << 20);
    builder.keepAliveTime(10, TimeUnit.SECONDS);
    if (arguments.length > 2) {
      var tls = GrpcSslContexts.forClient().trustManager(new File(arguments[2]));
      builder.sslContext(tls.keyManager(new File(arguments[3]), new File(arguments[4])).build());
      builder.overrideAuthority("localhost");
    } else {
      builder.negotiationType(NegotiationType.PLAINTEXT);
    }
    Client client = new Client(arguments[0], builder.build());
    for (Map.Entry<String, Check> each : client.checks().entrySet()) {
      String problem = "";
      try {
        each.getValue().run();
      } catch (Exception | AssertionError error) {
        problem = error.toString().replaceAll("[\"\\\\\n]", " ");
      }
      System.out.println("{\"check\": \"" + each.getKey() + "\", \"problem\": \"" + problem + "\"}");
    }
    System.exit(0);
  }
}
