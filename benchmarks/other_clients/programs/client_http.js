// Node's HTTP clients against Gangway: `node client_http.js FOLDER HTTP_ADDRESS`. fetch, undici, axios and Node's own.
const fs = require("fs");
const http = require("http");
const path = require("path");
const zlib = require("zlib");
const axios = require("axios");
const undici = require("undici");

const CONCURRENT = 50, ROUNDS = 20;
const [folder, address] = process.argv.slice(2);
const base = `http://${address}`;
const file = (name) => fs.readFileSync(path.join(folder, name));

function expect(condition, what) {
  if (!condition) throw new Error(String(what));
}

const headersOf = (kind) => ({ "Inference-Header-Content-Length": file(kind + ".json-bytes").toString().trim() });
const URL_OF_ECHO = base + "/v2/models/echo/infer";

function check(status, body, kind) {
  expect(status === 200, `${status} ${body}`);
  expect(body.equals(file(kind + ".reply")), `another answer of ${body.length} bytes`);
}

async function* pieces(bytes) {
  for (let at = 0; at < bytes.length; at += 100000) yield bytes.subarray(at, at + 100000);
}

const agent = new http.Agent({ keepAlive: true, maxSockets: 4 });

function own(method, target, headers, body, write) {
  return new Promise((resolve, reject) => {
    const request = http.request(base + target, { method, headers, agent }, (answer) => {
      const parts = [];
      answer.on("data", (part) => parts.push(part)).on("error", reject);
      answer.on("end", () => resolve({ status: answer.statusCode, headers: answer.headers, body: Buffer.concat(parts) }));
    });
    request.on("error", reject);
    if (write) write(request);
    else request.end(body);
  });
}

const WAYS = {
  fetch: async (kind, more = {}) => {
    const answer = await fetch(URL_OF_ECHO, { method: "POST", body: file(kind + ".body"), ...more, headers: { ...headersOf(kind), ...more.headers } });
    check(answer.status, Buffer.from(await answer.arrayBuffer()), kind);
  },
  undici: async (kind, more = {}) => {
    const answer = await undici.request(URL_OF_ECHO, { method: "POST", body: file(kind + ".body"), headers: headersOf(kind), ...more });
    check(answer.statusCode, Buffer.from(await answer.body.arrayBuffer()), kind);
  },
  axios: async (kind) => {
    const answer = await axios.post(URL_OF_ECHO, file(kind + ".body"), { headers: headersOf(kind), responseType: "arraybuffer", maxBodyLength: Infinity });
    check(answer.status, Buffer.from(answer.data), kind);
  },
  http: async (kind) => {
    const answer = await own("POST", "/v2/models/echo/infer", headersOf(kind), file(kind + ".body"));
    check(answer.status, answer.body, kind);
  },
};

const CHECKS = {};
for (const [name, ask] of Object.entries(WAYS)) {
  CHECKS[`${name}: small`] = () => ask("small");
  CHECKS[`${name}: 16 MB`] = () => ask("large");
  CHECKS[`${name}: one after the other`] = async () => { for (let round = 0; round < ROUNDS; round++) await ask("small"); };
  CHECKS[`${name}: many at a time`] = () => Promise.all(Array.from({ length: CONCURRENT }, () => ask("small")));
}
CHECKS["fetch: chunks"] = () => WAYS.fetch("large", { body: pieces(file("large.body")), duplex: "half" });
CHECKS["fetch: Connection: close"] = () => WAYS.fetch("small", { headers: { connection: "close" } });
CHECKS["undici: pipelining"] = async () => {
  const client = new undici.Client(base, { pipelining: 10 });
  const asked = Array.from({ length: CONCURRENT }, () => client.request({ path: "/v2/health/live", method: "GET" }).then((answer) => answer.body.text().then(() => answer.statusCode)));
  expect((await Promise.all(asked)).every((status) => status === 200), "not all");
  await client.close();
};
CHECKS["http: expect"] = async () => {
  const headers = { ...headersOf("large"), Expect: "100-continue", "Content-Length": file("large.body").length };
  const answer = await own("POST", "/v2/models/echo/infer", headers, null, (request) => {
    request.on("continue", () => request.end(file("large.body")));
    request.flushHeaders();
  });
  check(answer.status, answer.body, "large");
};
CHECKS["http: gzip both ways"] = async () => {
  const headers = { ...headersOf("small"), "Content-Encoding": "gzip", "Accept-Encoding": "gzip" };
  const answer = await own("POST", "/v2/models/echo/infer", headers, zlib.gzipSync(file("small.body")));
  const body = answer.headers["content-encoding"] === "gzip" ? zlib.gunzipSync(answer.body) : answer.body;
  check(answer.status, body, "small");
};
CHECKS["http: HEAD"] = async () => {
  const answer = await own("HEAD", "/v2/health/live", {});
  expect(answer.body.length === 0, answer.body);
  await WAYS.http("small");
};
CHECKS["http: error"] = async () => {
  const answer = await own("POST", "/v2/models/nobody/infer", {}, "{}");
  expect(JSON.parse(answer.body).error.includes("nobody"), answer.body);
};

async function main() {
  for (const [name, run] of Object.entries(CHECKS)) {
    const problem = await run().then(() => "", (error) => `${error} ${error.cause || ""}`.slice(0, 300));
    console.log(JSON.stringify({ check: name, problem }));
  }
  process.exit(0);
}

main();
