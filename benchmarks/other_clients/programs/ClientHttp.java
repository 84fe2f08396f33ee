// Java's HTTP client against Gangway: `java ClientHttp.java FOLDER HTTP_ADDRESS`. It offers h2c unless told otherwise.

import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.stream.IntStream;
import java.util.zip.GZIPInputStream;

public final class ClientHttp {
  private static final int CONCURRENT = 50, ROUNDS = 20;

  private interface Check { void run() throws Exception; }

  private static String base, folder;

  private static void expect(boolean condition, Object what) {
    if (!condition) throw new AssertionError(what);
  }

  private static byte[] file(String name) throws Exception { return Files.readAllBytes(Path.of(folder, name)); }

  private static HttpRequest.Builder to(String path) {
    return HttpRequest.newBuilder(URI.create(base + path)).timeout(Duration.ofSeconds(60));
  }

  private static HttpRequest.Builder infer(BodyPublisher body, String kind) throws Exception {
    String json = new String(file(kind + ".json-bytes")).strip();
    return to("/v2/models/echo/infer").POST(body).header("Inference-Header-Content-Length", json);
  }

  private static void answered(HttpClient client, String kind) throws Exception {
    check(client.send(infer(BodyPublishers.ofByteArray(file(kind + ".body")), kind).build(), BodyHandlers.ofByteArray()), kind);
  }

  private static void check(HttpResponse<byte[]> answer, String kind) throws Exception {
    expect(answer.statusCode() == 200, answer.statusCode() + new String(answer.body()));
    expect(Arrays.equals(answer.body(), file(kind + ".reply")), "another answer of " + answer.body().length + " bytes");
    expect(answer.version() == HttpClient.Version.HTTP_1_1, answer.version());
  }

  private static Map<String, Check> checks(HttpClient client) throws Exception {
    Map<String, Check> checks = new LinkedHashMap<>();
    checks.put("health", () -> expect(client.send(to("/v2/health/ready").GET().build(), BodyHandlers.ofString()).statusCode() == 200, "not ready"));
    checks.put("small", () -> answered(client, "small"));
    checks.put("16 MB", () -> answered(client, "large"));
    checks.put("one connection", () -> { for (int round = 0; round < ROUNDS; round++) answered(client, "small"); });
    checks.put("chunks", () -> {
      byte[] body = file("large.body");
      BodyPublisher pieces = BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body));
      check(client.send(infer(pieces, "large").build(), BodyHandlers.ofByteArray()), "large");
    });
    checks.put("expect", () -> {
      HttpRequest request = infer(BodyPublishers.ofByteArray(file("large.body")), "large").expectContinue(true).build();
      check(client.send(request, BodyHandlers.ofByteArray()), "large");
    });
    checks.put("refused with expect", () -> {
      HttpRequest request = to("/v2/models/nobody/infer").POST(BodyPublishers.ofByteArray(file("large.body"))).expectContinue(true).build();
      expect(client.send(request, BodyHandlers.ofString()).statusCode() >= 400, "200");
    });
    checks.put("gzip", () -> {
      HttpRequest request = infer(BodyPublishers.ofByteArray(file("small.body")), "small").header("Accept-Encoding", "gzip").build();
      HttpResponse<byte[]> answer = client.send(request, BodyHandlers.ofByteArray());
      byte[] body = answer.body();
      if (answer.headers().firstValue("content-encoding").orElse("").equals("gzip"))
        body = new GZIPInputStream(new ByteArrayInputStream(body)).readAllBytes();
      expect(Arrays.equals(body, file("small.reply")), "another answer");
    });
    checks.put("error", () -> {
      HttpResponse<String> answer = client.send(to("/v2/models/nobody/infer").POST(BodyPublishers.ofString("{}")).build(), BodyHandlers.ofString());
      expect(answer.body().contains("error"), answer.statusCode() + answer.body());
    });
    checks.put("HEAD", () -> {
      HttpRequest request = to("/v2/health/live").method("HEAD", BodyPublishers.noBody()).build();
      expect(client.send(request, BodyHandlers.ofString()).body().isEmpty(), "a body");
      answered(client, "small");
    });
    checks.put("many at a time", () -> {
      byte[] body = file("small.body");
      CompletableFuture<?>[] calls = IntStream.range(0, CONCURRENT).mapToObj(number -> {
        try {
          return client.sendAsync(infer(BodyPublishers.ofByteArray(body), "small").build(), BodyHandlers.ofByteArray()).thenAccept(answer -> {
            try {
              check(answer, "small");
            } catch (Exception error) {
              throw new RuntimeException(error);
            }
          });
        } catch (Exception error) {
          throw new RuntimeException(error);
        }
      }).toArray(CompletableFuture<?>[]::new);
      CompletableFuture.allOf(calls).get();
    });
    return checks;
  }

  public static void main(String[] arguments) throws Exception {
    folder = arguments[0];
    base = "http://" + arguments[1];
    for (HttpClient.Version version : HttpClient.Version.values())
      for (Map.Entry<String, Check> each : checks(HttpClient.newBuilder().version(version).build()).entrySet()) {
        String problem = "";
        try {
          each.getValue().run();
        } catch (Exception | AssertionError error) {
          problem = error.toString().replaceAll("[\"\\\\\n]", " ");
        }
        System.out.println("{\"check\": \"" + version + ": " + each.getKey() + "\", \"problem\": \"" + problem + "\"}");
      }
    System.exit(0);
  }
}
