// -- a command and a program that send what the form has

const ARGUMENTS = ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout"];  // of tritonclient's infer
const PYTHON_WORDS = {true: "True", false: "False", null: "None", NaN: 'float("nan")', Infinity: 'float("inf")', "-Infinity": 'float("-inf")'};
const NAMES = {curl: "curl", python: "Python"};
const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;
const absolute = path => new URL(path, location.href).href;
// JSON as Python has it, where strings and numbers are the same.
const pythonOf = json => json.replace(/"(?:[^"\\]|\\.)*"|true|false|null|NaN|-?Infinity/g, word => PYTHON_WORDS[word] ?? word);

function showSnippets() {
  const reasons = new Map();  // why there is none, and of what
  const snippets = [["curl", curlOf], ["python", programOf]].flatMap(([kind, make]) => {
    try { return snippetOf(kind, make()); } catch (error) { reasons.set(error.message, [...reasons.get(error.message) ?? [], NAMES[kind]]); }
    return [];
  });
  const notes = [...reasons].map(([reason, kinds]) => made("p", `No snippet for ${kinds.join(" and ")}: ${reason}`, "faint"));
  $("snippets").replaceChildren(...notes, ...snippets);
}

function snippetOf(kind, text, id = kind) {
  const titled = made("div", "", "titled"), shown = made("pre", text), copy = made("button", "Copy");
  shown.id = id;
  titled.append(made("h2", NAMES[kind]), copy);
  copy.type = "button";
  copy.addEventListener("click", async () => {
    getSelection().selectAllChildren(shown);
    if (navigator.clipboard) await navigator.clipboard.writeText(text);  // which pages without TLS do not have
    else document.execCommand("copy");
    copy.textContent = "Copied";
  });
  return [titled, shown];
}

function withoutFiles() {
  const used = usedFields(), chosen = used.find(field => field.file.files?.length);
  if (chosen) throw new Error(`${chosen.input.name} is a file; \`gangway client\` sends pictures and files`);
  return used;
}

function curlOf() {
  const used = withoutFiles();
  const long = used.find(field => repeats(field.texts().length, product(shapeOf(field))));
  if (long) throw new Error(`${long.input.name} has too many values for a command`);
  if (content.decoupled) return `curl -N ${quoted(absolute(`${pathOf("v2")}/generate_stream`))} -d ${quoted(generateBody().body)}`;
  const binary = [...used.map(field => field.input), ...content.outputs]
    .find(each => BINARY_ONLY.includes(each.datatype) && !Number(each.classes?.value));
  if (binary) throw new Error(`JSON has no ${binary.datatype}`);
  const members = [`"inputs":[${used.map(field => inputText(field, shapeOf(field), `"data":[${arrayOf(field)}]`))}]`];
  if (parametersOf() !== "{}") members.unshift(`"parameters":${parametersOf()}`);
  const wanted = content.outputs.filter(each => Number(each.classes?.value));
  if (wanted.length) members.push(`"outputs":${JSON.stringify(content.outputs.map(each => wanted.includes(each)
    ? {name: each.name, parameters: {classification: Number(each.classes.value)}} : {name: each.name}))}`);
  return `curl ${quoted(absolute(`${pathOf("v2")}/infer`))} -d ${quoted(`{${members}}`)}`;
}

function arrayText(field) {
  const {datatype} = field.input, values = arrayOf(field, false), wanted = product(shapeOf(field)), shape = `[${shapeOf(field).join(", ")}]`;
  const dtype = datatype === "BYTES" ? "object" : datatype === "BF16" ? "ml_dtypes.bfloat16"
    : JSON.stringify(datatype.toLowerCase().replace(/^fp/, "float"));
  const array = `np.array([${values.map(pythonOf).join(", ")}], ${dtype})`;
  return repeats(values.length, wanted) ? `np.resize(${array}, ${shape})` : `${array}.reshape(${shape})`;
}

function programOf() {
  const used = withoutFiles();
  if (content.decoupled) return `import json
import urllib.request

content = ${pythonOf(generateBody().body)}
request = urllib.request.Request(${JSON.stringify(absolute(`${pathOf("v2")}/generate_stream`))}, json.dumps(content).encode())
for line in urllib.request.urlopen(request):
    print(line.decode(), end="")`;
  const options = version() ? [`model_version="${version()}"`] : [], others = {};
  for (const [name, value] of Object.entries(JSON.parse(parametersOf()))) {
    if (ARGUMENTS.includes(name)) options.push(`${name}=${pythonOf(JSON.stringify(value))}`);
    else others[name] = value;
  }
  if (Object.keys(others).length) options.push(`parameters=${pythonOf(JSON.stringify(others))}`);
  const classes = content.outputs.some(each => Number(each.classes?.value));
  if (classes) options.push(`outputs=[${content.outputs.map(each => `triton.InferRequestedOutput(${JSON.stringify(each.name)}` +
    `${Number(each.classes?.value) ? `, class_count=${Number(each.classes.value)}` : ""})`).join(", ")}]`);
  const isBf16 = used.some(field => field.input.datatype === "BF16");
  const inputs = used.flatMap((field, place) => [
    `input${place} = triton.InferInput(${JSON.stringify(field.input.name)}, [${shapeOf(field).join(", ")}], "${field.input.datatype}")`,
    `input${place}.set_data_from_numpy(${arrayText(field)})`]);
  const base = absolute("../").replace(/^https?:\/\/|\/$/g, ""), names = used.map((_, place) => `input${place}`).join(", ");
  return `# pip install 'tritonclient[http]' numpy${isBf16 ? " ml_dtypes" : ""}
${isBf16 ? "import ml_dtypes\n" : ""}import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient("${base}"${location.protocol === "https:" ? ", ssl=True" : ""})
${inputs.join("\n")}
answer = client.infer(${[JSON.stringify(model), `[${names}]`, ...options].join(", ")})
for output in answer.get_response()["outputs"]:
    print(output["name"], answer.as_numpy(output["name"]))`;
}
