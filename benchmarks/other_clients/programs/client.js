// gRPC of Node (its own HTTP/2) against Gangway: `node client.js FOLDER ADDRESS [ROOT CERTIFICATE KEY]`. See __main__.py.
const fs = require("fs");
const path = require("path");
const readline = require("readline");
const grpc = require("@grpc/grpc-js");

const SERVICE = "/inference.GRPCInferenceService/";
const CONCURRENT = 200, ROUNDS = 3, WAIT_MS = 60000;
const [folder, address, ...tls] = process.argv.slice(2);
const file = (name) => fs.readFileSync(path.join(folder, name));
const say = (content) => console.log(JSON.stringify(content));
const later = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const asIs = (bytes) => bytes;
const options = {
  "grpc.max_receive_message_length": -1,
  "grpc.max_send_message_length": -1,
  "grpc.keepalive_time_ms": 10000,
  "grpc.ssl_target_name_override": "localhost",
  "grpc.max_reconnect_backoff_ms": 500,
};
const lines = readline.createInterface({ input: process.stdin })[Symbol.asyncIterator]();
let client;

function connect(more = {}) {
  const own = tls.map((name) => fs.readFileSync(name));
  const credentials = tls.length ? grpc.credentials.createSsl(own[0], own[2], own[1]) : grpc.credentials.createInsecure();
  return new grpc.Client(address, credentials, { ...options, ...more });
}

async function ask(what) {
  say({ ask: what });
  await lines.next();
}

function infer(name, { via = client, metadata = new grpc.Metadata(), ms = WAIT_MS, cancelMs = 0 } = {}) {
  return new Promise((resolve, reject) => {
    const done = (error, answer) => (error ? reject(error) : resolve(answer));
    const limit = { deadline: Date.now() + ms };
    const call = via.makeUnaryRequest(SERVICE + "ModelInfer", asIs, asIs, file(name + ".request"), metadata, limit, done);
    if (cancelMs) setTimeout(() => call.cancel(), cancelMs);
  });
}

async function answered(name, how) {
  const answer = await infer(name, how);
  if (!answer.equals(file(name + ".answer"))) throw new Error(`another answer of ${answer.length} bytes`);
}

async function refused(asked, code, text = "") {
  const error = await asked.then(() => null, (caught) => caught);
  if (!error || error.code !== code || !error.details.includes(text)) throw new Error(`not ${code} ${text}, but ${error}`);
}

function streamCall() {
  return client.makeBidiStreamRequest(SERVICE + "ModelStreamInfer", asIs, asIs, new grpc.Metadata(), {
    deadline: Date.now() + WAIT_MS,
  });
}

async function streamed() {
  const call = streamCall(), wanted = file("stream.answer");
  let rounds = 0;
  call.write(file("small.request"));
  for await (const answer of call) {
    if (!answer.equals(wanted)) throw new Error(`another answer of ${answer.length} bytes`);
    rounds += 1;
    if (rounds < ROUNDS) call.write(file("small.request"));
    else call.end();
  }
  if (rounds !== ROUNDS) throw new Error(`${rounds} answers`);
}

async function pythonModels() {
  await answered("lengths");
  await answered("chain_bytes");
  await refused(infer("raises"), grpc.status.INTERNAL, "ValueError: no value");
  for (const model of ["streams", "chain_streams"]) {
    const call = streamCall();
    let count = 0;
    call.write(file(model + ".request"));
    call.end();
    for await (const answer of call) {
      if (!answer.equals(file(`${model}.${count}.answer`))) throw new Error(`another answer ${count} of ${model}`);
      count += 1;
    }
    if (count !== 5) throw new Error(`${count} answers of ${model}`);
  }
}

async function givenUp() {
  await refused(infer("slow", { cancelMs: 200 }), grpc.status.CANCELLED);
  const call = streamCall();
  const ended = new Promise((resolve, reject) => call.on("error", reject).on("data", () => 0).on("end", resolve));
  call.write(file("slow.request"));
  setTimeout(() => call.cancel(), 200);
  await refused(ended, grpc.status.CANCELLED);
  await answered("small");
}

async function withMetadata() {
  const metadata = new grpc.Metadata();
  metadata.add("x-text", "some text");
  metadata.add("x-raw-bin", Buffer.from([0, 255, 10, 128]));
  metadata.add("x-many", "1");
  metadata.add("x-many", "2");
  await answered("small", { metadata });
}

async function compressed() {
  const via = connect({ "grpc.default_compression_algorithm": 2 });
  await answered("large", { via });
  via.close();
}

async function killed() {
  await ask("kill");
  for (const end = Date.now() + WAIT_MS; ; await later(20)) {
    const error = await answered("small").then(() => null, (caught) => caught);
    if (!error) return;
    if (Date.now() > end) throw error;
  }
}

async function drained() {
  const slow = answered("slow");
  await later(500);
  await ask("drain");
  await slow;
}

const CHECKS = {
  small: () => answered("small"),
  "16 MB": () => answered("large"),
  gzip: compressed,
  stream: streamed,
  "Python models": pythonModels,
  deadline: () => refused(infer("slow", { ms: 300 }), grpc.status.DEADLINE_EXCEEDED),
  cancellation: givenUp,
  metadata: withMetadata,
  error: () => refused(infer("unknown"), grpc.status.NOT_FOUND, file("unknown.text").toString()),
  "too large": () => refused(infer("huge"), grpc.status.RESOURCE_EXHAUSTED, file("huge.text").toString()),
  "200 at a time": () => Promise.all(Array.from({ length: CONCURRENT }, () => answered("small"))),
  keepalive: () => answered("idle"),
  "front end killed": killed,
  drained,
};

async function main() {
  client = connect();
  for (const [check, run] of Object.entries(CHECKS)) {
    const problem = await run().then(() => "", (error) => String(error));
    say({ check, problem });
  }
  process.exit(0);
}

main();
