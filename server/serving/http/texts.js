// -- texts, of models that `/v1/embeddings` or `/v1/rerank` can serve

const FIRST_VALUES = 8;
const ownLines = text => text.split("\n").map(line => line.trim()).filter(Boolean);

function areaOf(id, label, rows, value) {
  const area = made("textarea", value);
  area.id = id;
  area.rows = rows;
  const row = labelled(label, area);
  row.className = "block";
  return row;
}

function showTexts() {
  const {texts} = content;
  $("texts").hidden = !texts;
  if (!texts) return $("texts").replaceChildren();
  const isEmbedding = texts.task === "embed", form = made("form"), send = made("button", isEmbedding ? "Embed" : "Rerank");
  const sent = made("span", "", "faint"), row = made("div", "", "row"), answer = made("div", "", "answer"), snippets = made("div");
  const areas = isEmbedding ? [areaOf("text", "text", 3, "A cat sits on the mat.")]
    : [areaOf("query", "query", 1, "Where is the cat?"), areaOf("documents", "documents, one a line", 4, "A cat sits on the mat.\nIt rains in the north.")];
  const path = `../v1/${isEmbedding ? "embeddings" : "rerank"}`;
  const bodyOf = () => isEmbedding ? {model, input: $("text").value} : {model, query: $("query").value, documents: ownLines($("documents").value)};
  const showBoth = () => snippets.replaceChildren(...snippetOf("curl", `curl ${quoted(absolute(path))} -d ${quoted(JSON.stringify(bodyOf()))}`, "text_curl"),
    ...snippetOf("python", isEmbedding ? embeddingProgram(bodyOf()) : rerankProgram(bodyOf(), absolute(path)), "text_python"));
  sent.setAttribute("role", "status");
  answer.id = "text_answer";
  answer.setAttribute("aria-live", "polite");
  send.id = "send_text";
  row.append(send, sent);
  form.append(...areas, row);
  form.addEventListener("input", showBoth);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    send.disabled = true;
    sent.textContent = "sent";
    answer.replaceChildren();
    try {
      const body = bodyOf(), begin = performance.now();
      const got = await fetch(path, {method: "POST", headers: header, body: JSON.stringify(body)});
      const shown = got.ok ? (isEmbedding ? vectorOf : orderOf)(await got.json(), body) : [made("p", await refusalOf(got), "bad")];
      sent.textContent = `${got.ok ? "answered" : "refused"} after ${(performance.now() - begin).toFixed(1)} ms`;
      answer.replaceChildren(...shown);
    } catch (error) {
      answer.replaceChildren(made("p", error.message, "bad"));
      sent.textContent = "";
    }
    send.disabled = false;
  });
  $("texts").replaceChildren(made("h2", isEmbedding ? "Embed this text" : "Rerank these documents"), form, answer, snippets);
  showBoth();
}

function vectorOf(got) {
  const vector = got.data[0].embedding, rest = vector.length - FIRST_VALUES, tokens = got.usage.total_tokens;
  const values = vector.slice(0, FIRST_VALUES).map(each => Number(each.toPrecision(4))).join(", ") + (rest > 0 ? `, and ${rest} more` : "");
  const length = Number(Math.hypot(...vector).toPrecision(4));
  const rows = [["dimension", vector.length], ["first values", values], ["length", length], ...tokens ? [["tokens", tokens]] : []];
  return [tableOf(["embedding", ""], rows.map(([name, value]) => {
    const row = rowOf(name, String(value));
    row.lastChild.className = "long";
    return row;
  }))];
}

function orderOf(got, {documents}) {
  return [tableOf(["score", "document"], got.results.map(({index, relevance_score: score}) => {
    const row = rowOf(score.toPrecision(4), documents[index]);
    row.lastChild.className = "long";
    return row;
  }))];
}

const embeddingProgram = body => `# pip install openai
from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(absolute("../v1"))}, api_key="none")
answer = client.embeddings.create(model=${JSON.stringify(body.model)}, input=${JSON.stringify(body.input)})
vector = answer.data[0].embedding
print(len(vector), vector[:${FIRST_VALUES}])`;

const rerankProgram = (body, address) => `import json
import urllib.request

content = ${pythonOf(JSON.stringify(body))}
request = urllib.request.Request(${JSON.stringify(address)}, json.dumps(content).encode())
for result in json.load(urllib.request.urlopen(request))["results"]:
    print(result["relevance_score"], content["documents"][result["index"]])`;
