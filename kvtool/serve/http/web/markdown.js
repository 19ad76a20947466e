"use strict";

const get = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en");
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// makes an element; texts become text nodes, never HTML
function make(tag, props = {}, ...inside) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...inside);
  return node;
}

function button(text, onclick, label = text) {
  const node = make("button", { type: "button", textContent: text, onclick });
  node.setAttribute("aria-label", label);
  return node;
}

// Markdown

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}#{1,6} +(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,3}[.)])(?: +(.*)|)$/;
const INLINE = /(?<!`)(`+)(?!`)([^]*?[^`])\1(?!`)|\*\*(?=\S)([^]*?\S)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*])/g;
// a longer or more deeply nested text is shown unformatted, so that no reply can block the page
const DEEPEST = 8, LONGEST = 5000;

const starts = (line) => [FENCE, HEADING, RULE, ITEM, /^>/].some((each) => each.test(line));
const isBlank = (line) => !line.trim();
const isSetIn = (line) => line.replace(/\t/g, "    ").search(/\S/);

function inline(text, depth = 0) {
  if (depth > 3 || text.length > LONGEST) return [text];
  const found = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, bold, soft] = match;
    const inside = code === undefined ? inline(bold ?? soft, depth + 1) : [code];
    found.push(text.slice(at, match.index), make(code !== undefined ? "code" : bold ? "strong" : "em", {}, ...inside));
    at = match.index + whole.length;
  }
  return [...found, text.slice(at)];
}

// returns the blocks of a text: the source of each, and a function that makes its element
function blocks(text, depth = 0) {
  const lines = text.split("\n"), found = [];
  let i = 0;
  const take = (ends) => {
    const from = i;
    while (i < lines.length && !ends(lines[i])) i++;
    return lines.slice(from, i);
  };
  while (i < lines.length) {
    const from = i, line = lines[i], fence = FENCE.exec(line), heading = HEADING.exec(line);
    let node;
    if (isBlank(line)) { i++; continue; }
    if (fence) {
      i++;
      const inside = take((each) => each.trim().startsWith(fence[1]) && !each.trim().replaceAll(fence[1][0], "")).join("\n");
      i++;
      node = () => codeBlock(inside, fence[2].trim());
    } else if (heading) {
      i++;
      node = () => make("h3", {}, ...inline(heading[1]));
    } else if (RULE.test(line)) {
      i++;
      node = () => make("hr");
    } else if (line.startsWith(">") && depth < DEEPEST) {
      const inside = take((each) => !each.startsWith(">")).map((each) => each.replace(/^> ?/, "")).join("\n");
      node = () => make("blockquote", {}, ...elements(inside, depth + 1));
    } else if (ITEM.test(line) && depth < DEEPEST) {
      node = list(depth);
    } else if (line.includes("|") && /^[\s|:-]*$/.test(lines[i + 1] ?? "") && /-.*\||\|.*-/.test(lines[i + 1])) {
      const rows = take((each) => !each.includes("|")).map((each) => each.trim().replace(/^\||\|$/g, "").split("|"));
      node = () => make("div", { className: "table", tabIndex: 0 }, make("table", {}, ...rows.filter((_, row) => row !== 1).map(
        (row, y) => make("tr", {}, ...row.map((cell) => make(y ? "td" : "th", {}, ...inline(cell.trim())))))));
    } else {
      i++;
      const inside = [line, ...take((each) => isBlank(each) || starts(each))].join("\n");
      node = () => make("p", {}, ...inline(inside));
    }
    found.push({ source: lines.slice(from, i).join("\n"), node });
  }
  return found;

  function list(depth) {
    const [, , first] = ITEM.exec(lines[i]), isOrdered = /\d/.test(first), items = [];
    const next = (at) => {
      while (at < lines.length && isBlank(lines[at])) at++;
      return at;
    };
    for (let match; (match = ITEM.exec(lines[i] ?? "")) && /\d/.test(match[2]) === isOrdered && !RULE.test(lines[i]);) {
      const base = isSetIn(lines[i]), by = base + match[2].length + 1, own = [match[3] ?? ""];
      for (i++; i < lines.length;) {
        const after = next(i), goesOn = after === i && !starts(lines[i]) && !isBlank(lines[i - 1]);
        if (!goesOn && isSetIn(lines[after] ?? "") < base + 2) break;
        for (; i <= after; i++) own.push(lines[i].replace(/^[ \t]+/, (blank) => blank.replace(/\t/g, "    ").slice(by)));
      }
      items.push(own.join("\n"));
      if (isBlank(lines[i] ?? "x") && ITEM.test(lines[next(i)] ?? "")) i = next(i);
    }
    const start = isOrdered ? { start: parseInt(first) } : {};
    return () => make(isOrdered ? "ol" : "ul", start, ...items.map((each) => make("li", {}, ...elements(each, depth + 1))));
  }
}

const elements = (text, depth) => blocks(text, depth).map(({ node }) => node());

function codeBlock(text, name) {
  const copies = button("Copy", (event) => copy(text, event.target), "Copy code");
  const head = make("div", { className: "faint" }, make("span", { textContent: name }), copies);
  return make("div", { className: "code", dir: "ltr" }, head, make("pre", { tabIndex: 0 }, make("code", { textContent: text })));
}

// unchanged blocks keep their elements, so that a selection in them stays
function show(into, text) {
  const found = blocks(text.replace(/\r\n?/g, "\n")), old = [...into.childNodes];
  let same = 0;
  while (same < found.length && old[same]?.source === found[same].source) same++;
  for (const node of old.slice(same)) node.remove();
  for (const { source, node } of found.slice(same)) into.append(Object.assign(node(), { source }));
}

async function copy(text, from) {
  try {
    // the clipboard exists only for https or this machine's own address
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = "Copy"; }, 1500);
}
