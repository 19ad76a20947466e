// data in this browser's storage

const store = {
  get(name) {
    try { return JSON.parse(localStorage.getItem("kvtool." + name)); } catch { return null; }
  },
  set(name, value) {
    try { localStorage.setItem("kvtool." + name, JSON.stringify(value)); } catch {
      get("about").textContent = "The browser has no room left for chats: delete one.";
    }
  },
  remove(name) {
    try { localStorage.removeItem("kvtool." + name); } catch { /* nothing was kept */ }
  },
};

const settings = { system: "", temperature: "", most: "", plain: false, held: false, ...store.get("settings") };
const chats = new Map(), runs = new Map(), shares = new Map();
const log = get("log"), text = get("text");
const opened = new WeakSet();
let chat, key = "", asking = null, isDue = false, atToken = -1, props = null, shown = "";
try { key = sessionStorage.getItem("kvtool.key") ?? ""; } catch { /* the page asks for the key again */ }

// the storage may hold anything
const listed = () => [store.get("chats")].flat().filter((each) => each?.id);
const kept = (id) => [store.get("chat." + id)].find((each) => Array.isArray(each?.messages));
const created = () => ({ id: [...crypto.getRandomValues(new Uint8Array(12))].map((n) => n.toString(16).padStart(2, "0")).join(""), system: null, messages: [] });

function titleOf(chat) {
  const [first] = chat.messages;
  const words = (first?.content || first?.files?.[0].name || "").trim().split(/\s+/).slice(0, 7).join(" ");
  return words.length > 48 ? words.slice(0, 47) + "\u2026" : words;
}

function save(chat) {
  if (chat.isDeleted || !chat.messages.length) return;
  chats.set(chat.id, chat);
  store.set("chats", [{ id: chat.id, title: titleOf(chat) }, ...listed().filter(({ id }) => id !== chat.id)]);
  store.set("chat." + chat.id, chat);
  drawList();
}

function open(id) {
  chat = chats.get(id) ?? kept(id) ?? created();
  if (id) chats.set(chat.id, chat);
  store.set("open", chat.id);
  get("chats").classList.remove("open");
  get("menu").setAttribute("aria-expanded", "false");
  draw();
  focusText();
}

function remove(id, title) {
  if (!confirm(`Delete the chat \u201c${title}\u201d?`)) return;
  runs.get(id)?.stop.abort();
  if (chats.has(id)) chats.get(id).isDeleted = true;
  chats.delete(id);
  store.set("chats", listed().filter((each) => each.id !== id));
  store.remove("chat." + id);
  if (chat.id === id) open(listed()[0]?.id);
  drawList();
}

// display of the chat

// on a touch screen, focus would show the keyboard
function focusText() {
  if (matchMedia("(pointer: fine)").matches) text.focus();
}

function grow(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}

function keepEnd(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function drawList() {
  // an unchanged list keeps its focus
  const now = JSON.stringify([listed(), chat.id]);
  if (now === shown) return;
  shown = now;
  get("list").replaceChildren(...listed().map(({ id, title }) => {
    const opens = button(title, () => open(id));
    opens.title = title;
    if (id === chat.id) opens.setAttribute("aria-current", "true");
    return make("li", {}, opens, button("\u00d7", () => remove(id, title), `Delete the chat: ${title}`));
  }));
}

function draw() {
  const isEmpty = !chat.messages.length;
  log.replaceChildren(...(isEmpty ? [make("p", { className: "faint" }, welcome())] : chat.messages.map((_, i) => article(i))));
  document.title = isEmpty ? "kvtool" : `${titleOf(chat)} \u00b7 kvtool`;
  get("save").disabled = isEmpty;
  refresh();
  log.scrollTop = log.scrollHeight;
}

// keeps existing elements, so that a selection in them stays
function refresh() {
  const run = runs.get(chat.id);
  chat.messages.forEach((_, i) => update(log.children[i], i));
  log.setAttribute("aria-busy", String(Boolean(run)));
  get("send").hidden = Boolean(run);
  get("stop").hidden = !run;
  drawList();
  drawHeld();
}

function welcome() {
  const kept = props ? `The cache keeps ${number(props.budget)} tokens per KV head, which the policy ${props.policy} chooses. ` : "";
  return `Write a message to start a chat. ${kept}A chat may get as long as you like: the cache keeps its size.`;
}

function article(i) {
  const thought = make("details", { className: "thought" }, make("summary"), make("p", { dir: "auto" }));
  const message = chat.messages[i], isUser = message.role === "user";
  thought.open = opened.has(message);
  thought.ontoggle = () => opened[thought.open ? "add" : "delete"](message);
  const acts = make("div", { className: "acts" }, button("Copy", (event) => copy(message.content, event.target), isUser ? "Copy your message" : "Copy the reply"));
  const files = make("ul", { className: "files faint" }, ...(message.files ?? []).map((file) => make("li", {}, labelOf(file))));
  files.hidden = !message.files?.length;
  const node = make("article", { className: message.role }, thought, files, make("div", { dir: "auto" }), make("p", { className: "foot faint" }), acts);
  node.setAttribute("aria-label", isUser ? "You" : "Model");
  acts.append(isUser ? button("Edit", () => edit(node, i), "Edit your message") : button("Retry", retry, "Write the reply again"));
  return node;
}

function update(node, i) {
  if (node.classList.contains("editing")) return;
  const message = chat.messages[i], isLast = i === chat.messages.length - 1, run = isLast && runs.get(chat.id);
  const [thought, , body, foot, acts] = node.children;
  const isPlain = message.role === "user" || settings.plain;
  thought.hidden = !message.thought;
  thought.firstChild.textContent = run && !message.content ? "Thinking ..." : "Thoughts";
  thought.lastChild.textContent = message.thought ?? "";
  body.className = isPlain ? "body plain" : "body";
  body.hidden = !message.content;
  if (!isPlain) show(body, message.content);
  else if (body.textContent !== message.content) body.textContent = message.content;
  const said = run ? [run.doing] : [message.error, message.note, message.status];
  foot.textContent = said.filter(Boolean).map(capital).join(" \u00b7 ");
  foot.hidden = !foot.textContent;
  foot.classList.toggle("error", Boolean(message.error && !run));
  acts.hidden = Boolean(run) || !(message.content || message.files?.length);
  const [, other] = acts.children;
  other.disabled = runs.has(chat.id);
  if (message.role === "user") return;
  other.hidden = !isLast;
  if (!run && isLast && !message.content) foot.append(button("Retry", retry));
}

// updates the last message, at most once a frame
function drawLast(its) {
  if (isDue || its !== chat) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const i = chat.messages.length - 1, node = log.children[i];
    if (node?.tagName === "ARTICLE") keepEnd(() => update(node, i));
  });
}

function edit(node, i) {
  const { content, files } = chat.messages[i];
  const area = make("textarea", { value: content, dir: "auto" });
  area.setAttribute("aria-label", "Your message");
  const close = () => {
    const again = article(i);
    node.replaceWith(again);
    update(again, i);
    focusText();
  };
  const send = () => {
    if (!(area.value.trim() || files?.length) || runs.has(chat.id)) return;
    const isLast = !chat.messages.slice(i + 1).some(({ role }) => role === "user");
    if (!isLast && !confirm("Delete all messages after this one?")) return;
    chat.messages.splice(i, Infinity, { role: "user", content: area.value, files });
    answer(chat);
  };
  area.onkeydown = (event) => onKeys(event, send, close);
  area.oninput = () => grow(area);
  const row = make("div", { className: "row" }, button("Cancel", close), button("Send", send));
  row.lastChild.className = "go";
  node.classList.add("editing");
  node.replaceChildren(make("div", { className: "body" }, area, row));
  grow(area);
  area.focus();
}

// while an input method composes a word, Enter ends the word
function onKeys(event, send, escape) {
  if (event.isComposing || event.keyCode === 229) return;
  if (event.key === "Escape") escape();
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  send();
}

// share of rows that hold each token

function drawHeld() {
  const share = shares.get(chat.id), spans = [];
  get("held").hidden = !settings.held;
  atToken = -1;
  get("token").textContent = "";
  for (const id of ["legend", "tokens"]) get(id).hidden = !share;
  if (!settings.held) return;
  if (!share) {
    get("counts").textContent = "The next reply will show which tokens of this chat the cache still holds.";
    return;
  }
  let all = 0, none = 0, archived = 0;
  share.held.forEach((held, i) => {
    const isArchived = share.archived[i];
    all += held === 1;
    archived += isArchived;
    none += held === 0 && !isArchived;
    spans.push(make("span", {
      className: `s${level(held)}${isArchived ? " archived" : ""}`, textContent: visible(share.text[i]), title: heldIn(share, i), token: i,
    }));
  });
  get("legend").lastChild.hidden = !archived;
  const n = share.held.length, first = n < share.tokens ? `the last ${number(n)} of ${number(share.tokens)} tokens` : `${number(n)} tokens`;
  get("counts").textContent = capital(`${first}: ${number(all)} held by every row, ${number(n - all - none - archived)} by some, ${archived ? `${number(archived)} archived, ` : ""}${number(none)} forgotten`);
  get("token").textContent = "Click a token, or move with the arrow keys, to see its share.";
  get("tokens").replaceChildren(...spans);
  get("tokens").scrollTop = get("tokens").scrollHeight;
}

const BOUNDS = [.02, .05, .1, .2, .4, .7];

// colour as in kvtool inspect: 0 for no row, 8 for all rows
function level(share) {
  if (share === 0 || share === 1) return 8 * share;
  const at = BOUNDS.findIndex((bound) => share <= bound);
  return (at < 0 ? BOUNDS.length : at) + 1;
}

function visible(text) {
  const picture = (sign) => String.fromCharCode(sign === "\x7f" ? 0x2421 : 0x2400 + sign.charCodeAt(0));
  return text.replace(/[\x80-\x9f\u202a-\u202e\u2066-\u2069]/g, "\ufffd").replace(/[\0-\x08\x0b-\x1f\x7f]/g, picture).replace(/\n/g, "\u23ce\n").replace(/\t/g, "\u2192   ");
}

function heldIn({ held, archived }, i) {
  if (archived[i]) return "archived: no row holds it, and it can come back";
  return held[i] ? `held by ${percent(held[i])} of the rows` : "forgotten: no row holds it";
}

function goTo(i, scrolls) {
  const spans = get("tokens").children, share = shares.get(chat.id);
  spans[atToken]?.classList.remove("here");
  atToken = Math.min(Math.max(i, 0), spans.length - 1);
  spans[atToken].classList.add("here");
  if (scrolls) spans[atToken].scrollIntoView({ block: "nearest" });
  get("token").textContent = `${JSON.stringify(share.text[atToken])}: ${heldIn(share, atToken)}`;
}

// requests

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

// a part between 0 and 1 is never rounded to 0 % or 100 %
const percent = (part) => (part === 0 || part === 1 ? `${100 * part} %` : `${Math.min(Math.max(100 * part, 0.1), 99.9).toFixed(1)} %`);

function bytes(n) {
  const at = Math.min(Math.floor(Math.log2(Math.max(n, 1)) / 10), 4);
  return at ? `${(n / 2 ** (10 * at)).toFixed(1)} ${["KiB", "MiB", "GiB", "TiB"][at - 1]}` : `${n} B`;
}

// the same line as in kvtool chat
function statusOf({ tokens, held, archived, forgotten, cache_bytes, unsaved }, timings) {
  const n = Math.max(tokens, 1), speed = timings?.predicted_per_second;
  // the mean over rows is rounded to a tenth; a larger difference means that rows hold different tokens
  const addUp = Math.abs(held + archived + forgotten - tokens) < 0.1;
  const shares = addUp
    ? [`${percent(held / n)} in the cache`, archived && `${percent(archived / n)} archived`, `${percent(forgotten / n)} forgotten`]
    : [`each KV head keeps ${percent(held / n)}`, `${percent(forgotten / n)} is forgotten`];
  return [`${number(tokens)} tokens: ${shares.filter(Boolean).join(", ")}`, `cache ${bytes(cache_bytes)}`, speed && `${speed.toFixed(1)} tokens/s`, unsaved].filter(Boolean).join(" \u00b7 ");
}

function readingOf({ total, cache, processed }) {
  const n = total - cache, done = processed - cache;
  return n > 0 ? `reading: ${Math.floor((100 * done) / n)} % of ${number(n)} tokens` : "reading ...";
}

// body of the request; a message without a reply is sent together with the next one
function bodyOf(chat) {
  const messages = chat.system ? [{ role: "system", content: chat.system }] : [];
  for (const message of chat.messages) {
    const { role } = message, content = wordsOf(message), last = messages.at(-1);
    if (role === "assistant" && !content) continue;
    if (role === "user" && last?.role === "user") last.content += `\n\n${content}`;
    else messages.push({ role, content });
  }
  const body = { messages, stream: true, return_progress: true };
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.most !== "") body.max_tokens = Number(settings.most);
  if (settings.held) body.kvtool = { share: 4000 };
  return body;
}

async function answer(its) {
  if (!its.messages.some(({ role }) => role === "assistant")) its.system = settings.system.trim() || null;
  const body = bodyOf(its), run = { chat: its, stop: new AbortController(), doing: "waiting ..." };
  // shown by other tabs until the reply ends, and by all tabs if this one is closed before
  const message = { role: "assistant", content: "", thought: "", note: "unfinished: its tab was closed, or is still writing" };
  its.messages.push(message);
  runs.set(its.id, run);
  save(its);
  if (its === chat) draw();
  let note = "";
  try {
    note = await stream(its, message, run, body);
  } catch (error) {
    if (!run.stop.signal.aborted) message.error = error.message;
    else note = message.content ? "stopped" : "stopped before the reply began";
  }
  message.note = note;
  runs.delete(its.id);
  save(its);
  if (its !== chat) return;
  keepEnd(refresh);
  get("say").textContent = message.error ?? "The reply has ended.";
  if (document.activeElement === document.body) focusText();
}

// streams a reply into its message; returns a note on it
async function stream(its, message, run, body) {
  const reader = (await ask(its, run, body)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", note = "", isOver = false;
  while (!isOver) {
    const { value, done } = await reader.read().catch((error) => {
      if (run.stop.signal.aborted) throw error;
      return { done: true };
    });
    if (done) throw new Error("the connection was lost before the reply ended");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") { isOver = true; break; }
      const piece = JSON.parse(line.slice(6)), choice = piece.choices?.[0];
      if (piece.prompt_progress) run.read = readingOf(piece.prompt_progress);
      if (piece.error) throw new Error(piece.error.message);
      message.thought += choice?.delta?.reasoning_content ?? "";
      message.content += choice?.delta?.content ?? "";
      if (choice?.finish_reason === "length") note = "cut off: the reply has reached its token limit";
      if (!piece.kvtool) continue;
      message.status = statusOf(piece.kvtool, piece.timings);
      if (piece.kvtool.share) shares.set(its.id, { ...piece.kvtool.share, tokens: piece.kvtool.tokens });
    }
    run.doing = message.thought || message.content ? "writing ..." : run.read ?? "reading ...";
    drawLast(its);
  }
  if (!message.content && !message.thought) return note || "the model said nothing";
  return note;
}

// returns the server's answer; waits until the model is loaded and the key is right
async function ask(its, run, body) {
  for (;;) {
    const own = { ...headers(), "Content-Type": "application/json", "X-Session-Id": its.id };
    let response;
    try {
      response = await fetch("v1/chat/completions", { method: "POST", headers: own, body: JSON.stringify(body), signal: run.stop.signal });
    } catch (error) {
      if (run.stop.signal.aborted) throw error;
      throw new Error("there is no connection to the server; see whether kvtool serve still runs");
    }
    if (response.ok) return response;
    const said = await response.json().catch(() => null);
    const words = said?.error?.message ?? `the server answered with status ${response.status}`;
    if (response.status === 503) {
      run.doing = `${words} ...`;
      drawLast(its);
      await pause(1000);
      run.stop.signal.throwIfAborted();
    } else if (response.status !== 401 || !(await askKey(words))) {
      throw new Error(words);
    }
  }
}

// asks for a key, once for all chats that need it; resolves to true if there is one
function askKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = get("ask-key");
    get("key-why").textContent = capital(why);
    get("key").value = dialog.returnValue = "";
    dialog.onclose = () => {
      asking = null;
      // keep only characters that a header can have
      key = dialog.returnValue.replace(/[^\x21-\x7e]/g, "");
      try { sessionStorage.setItem("kvtool.key", key); } catch { /* the page asks for the key again */ }
      if (key) about();
      resolve(Boolean(key));
    };
    dialog.showModal();
  });
  return asking;
}

function send() {
  if (!(text.value.trim() || attached.length) || runs.has(chat.id)) return;
  chat.messages.push({ role: "user", content: text.value, files: attached });
  text.value = "";
  attached = [];
  get("file-said").textContent = "";
  drawAttached();
  grow(text);
  answer(chat);
}

function retry() {
  if (runs.has(chat.id)) return;
  if (chat.messages.at(-1).role === "assistant") chat.messages.pop();
  answer(chat);
}

function cacheOf({ n_caches: n, cache_bytes }) {
  return n > 1 ? `${n} caches of ${bytes(cache_bytes / n)}` : `cache ${bytes(cache_bytes)}`;
}

// updates the line at the top; repeats until the server is ready
async function about() {
  let said = "no connection to the server ...";
  try {
    const response = await fetch("props", { headers: headers() });
    if (response.status === 401) return;
    const found = await response.json();
    said = response.ok ? "" : `${found.error.message} ...`;
    if (response.ok) props = found;
  } catch { /* the timer below repeats the request */ }
  if (said) setTimeout(about, 2000);
  get("about").textContent = said ? capital(said) : `${props.model_alias} \u00b7 ${props.policy}, ${number(props.budget)} tokens per KV head`;
  if (!said) get("about").append(make("span", { className: "wide", textContent: ` \u00b7 ${cacheOf(props)}` }));
  if (!said && !chat.messages.length) draw();
}

// events of the user

get("ask").onsubmit = (event) => { event.preventDefault(); send(); focusText(); };
get("stop").onclick = () => { runs.get(chat.id)?.stop.abort(); focusText(); };
get("new").onclick = () => open(null);
get("menu").onclick = () => {
  const isOpen = get("chats").classList.toggle("open");
  get("menu").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) get("new").focus();
};
document.onkeydown = (event) => {
  if (event.key !== "Escape" || !get("chats").classList.contains("open")) return;
  get("menu").click();
  get("menu").focus();
};
get("log").parentNode.onclick = (event) => {
  if (event.target !== get("menu") && get("chats").classList.contains("open")) get("menu").click();
};
text.onkeydown = (event) => onKeys(event, send, () => runs.get(chat.id)?.stop.abort());
text.oninput = () => grow(text);
get("set").onclick = () => get("settings").showModal();
get("close").onclick = () => get("settings").close();
get("key-form").onsubmit = (event) => { event.preventDefault(); get("ask-key").close(get("key").value.trim()); };
get("no-key").onclick = () => get("ask-key").close("");
get("tokens").onclick = (event) => { if (event.target.token !== undefined) goTo(event.target.token, false); };
get("tokens").onkeydown = (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key], n = get("tokens").children.length;
  if (!by || !n) return;
  event.preventDefault();
  goTo(atToken < 0 ? n - 1 : atToken + by, true);
};
for (const name of ["system", "temperature", "most"]) {
  get(name).value = settings[name];
  get(name).oninput = () => { settings[name] = get(name).value; store.set("settings", settings); };
}
for (const [id, name] of [["plain", "plain"], ["show-held", "held"]]) {
  get(id).checked = settings[name];
  get(id).onchange = () => { settings[name] = get(id).checked; store.set("settings", settings); keepEnd(draw); };
}
["no row", ...BOUNDS.map((bound) => `${Math.round(100 * bound)} %`), "more", "all rows", "archived"].forEach((name, i, names) => {
  get("legend").append(make("span", { className: i === names.length - 1 ? "archived" : `s${i}`, textContent: name }));
});
addEventListener("pagehide", () => { for (const run of runs.values()) save(run.chat); });
// changes by another tab
addEventListener("storage", ({ key: name }) => {
  const id = name?.replace("kvtool.chat.", "");
  if (name === "kvtool.chats") drawList();
  if (!chats.has(id) || runs.has(id)) return;
  chats.delete(id);
  if (id === chat.id) { chat = kept(id) ?? chat; chats.set(id, chat); draw(); }
});

open(store.get("open"));
about();
