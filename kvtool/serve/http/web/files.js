// text files in messages, and export of chats

const MOST_FILE = 2 * 2 ** 20;
let attached = [];

async function attach(files) {
  const wrong = [];
  for (const file of files) {
    const what = await textOf(file).then((text) => attached.push({ name: file.name, size: file.size, text }) && "", (error) => error.message);
    if (what) wrong.push(what);
  }
  get("file-said").textContent = wrong.join(" \u00b7 ");
  drawAttached();
  focusText();
}

async function textOf(file) {
  if (file.size > MOST_FILE) throw new Error(`${file.name} has ${bytes(file.size)}; a file may have ${bytes(MOST_FILE)}`);
  const data = await file.arrayBuffer().catch(() => { throw new Error(`${file.name} cannot be read`); });
  const [one, two] = new Uint8Array(data), mark = `${one} ${two}`;
  const encoding = { "255 254": "utf-16le", "254 255": "utf-16be" }[mark] ?? "utf-8";
  let text = "\0";
  try { text = new TextDecoder(encoding, { fatal: true }).decode(data); } catch { /* the next line reports it */ }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file`);
  return text.replace(/\r\n?/g, "\n");
}

const labelOf = ({ name, size }) => `${name}, ${bytes(size)}`;

function drawAttached() {
  get("files").hidden = !attached.length;
  get("files").replaceChildren(...attached.map((file) => make("li", {}, labelOf(file), button("\u00d7", () => {
    attached = attached.filter((each) => each !== file);
    drawAttached();
    focusText();
  }, `Remove the file ${file.name}`))));
}

// a message as the model reads it: files come first, because models answer a question after them best
function wordsOf({ content, files = [] }) {
  return [...files.map(fenced), content].filter((part) => part.trim()).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

function markdownOf(chat) {
  const names = { system: "System prompt", user: "You", assistant: "Model" };
  const parts = [`# ${titleOf(chat)}`];
  for (const { role, content, reasoning_content: thought } of saidIn(chat)) {
    parts.push(`## ${names[role]}`);
    if (thought) parts.push(thought.trim().replace(/^/gm, "> "));
    parts.push(content.trim());
  }
  return parts.join("\n\n") + "\n";
}

function jsonOf(chat) {
  const found = { title: titleOf(chat), model: props?.model_alias ?? null, exported_at: new Date().toISOString(), messages: saidIn(chat) };
  return JSON.stringify(found, null, 2) + "\n";
}

function saidIn(chat) {
  const system = chat.system ? [{ role: "system", content: chat.system }] : [];
  return [...system, ...chat.messages.map((message) => {
    const said = { role: message.role, content: wordsOf(message) };
    return message.thought ? { ...said, reasoning_content: message.thought } : said;
  })];
}

function download(text, type, ending) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })) });
  link.download = `${titleOf(chat).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}.${ending}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  get("export").close();
}

get("attach").onclick = () => get("file").click();
get("file").onchange = () => { attach([...get("file").files]); get("file").value = ""; };
get("log").parentNode.ondragover = (event) => { if (event.dataTransfer.types.includes("Files")) event.preventDefault(); };
get("log").parentNode.ondrop = (event) => {
  if (!event.dataTransfer.files.length) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
};
get("text").onpaste = (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach([...event.clipboardData.files]);
};
get("save").onclick = () => get("export").showModal();
get("no-export").onclick = () => get("export").close();
get("as-markdown").onclick = () => download(markdownOf(chat), "text/markdown", "md");
get("as-json").onclick = () => download(jsonOf(chat), "application/json", "json");
