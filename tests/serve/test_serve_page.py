"""The web page of kvtool serve: its files are complete, it loads nothing else, and it shows Markdown.

tests/tools/check_page.py checks the page in a browser.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtool.serve.http import app
from kvtool.serve.http.gate import Limits
from kvtool.serve.queue import Job
from tests.blocking_policy import TIMEOUT_S
from tests.serve.in_process_server import send

WEB = Path(__file__).parents[2] / "kvtool" / "serve" / "http" / "web"


@pytest.fixture(scope="module")
def page():
    return send("/")


def test_page_needs_no_key_and_is_served_while_the_model_loads(page):
    answer = send("/", limits=Limits(("secret",)), is_loaded=False)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.text == page.text
    assert page.text.startswith("<!doctype html>")
    assert page.text.endswith("</html>\n")
    assert "{{" not in page.text


def test_health_needs_no_key_and_is_503_until_the_model_is_loaded():
    keys = Limits(("secret",))
    answer = send("/health", limits=keys, is_loaded=False)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "loading"
    answer = send("/health", limits=keys)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_security_policy_allows_only_the_pages_script_and_its_server(page):
    policy = dict(each.split(" ", 1) for each in page.headers["content-security-policy"].split("; "))
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"


def test_page_loads_nothing_else(page):
    assert re.findall(r"https?:|//\w+\.\w|@import|url\(|@font-face|\bimport\(", page.text) == []
    assert re.findall(r"(?:src|href)=\S+", page.text) == ['href="data:,">']
    assert re.findall(r"fetch\((\S+?)[,)]", page.text) == ['"v1/chat/completions"', '"props"']


def test_page_script_never_parses_text_as_html(page):
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|DOMParser|createContextualFragment"
    )
    assert re.findall(rf"{ways}|\beval\(|new Function|srcdoc", page.text) == []


def test_no_element_has_a_script_or_style_attribute():
    # the page's security policy blocks scripts and styles in attributes
    tags = re.findall(r"<\w[^>]*>", (WEB / "page.html").read_text(encoding="utf-8"))
    assert [tag for tag in tags if re.search(r"\s(on\w+|style)=", tag)] == []


def test_ids_used_by_the_script_exist_in_the_page():
    html = (WEB / "page.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([\w-]+)"', html)
    assert len(ids) == len(set(ids))
    names = re.findall(r'(?<!\.)\bget\("([\w-]+)"\)', (WEB / "page.js").read_text(encoding="utf-8"))
    assert set(names) <= set(ids)
    for of in ("for", "aria-controls", "aria-labelledby"):
        assert set(re.findall(rf'\b{of}="([\w-]+)"', html)) <= set(ids)


def test_web_files_have_at_most_500_lines():
    assert [path.name for path in WEB.iterdir() if path.read_text(encoding="utf-8").count("\n") > 500] == []


def test_stream_sends_pings_while_a_long_prompt_is_read(monkeypatch):
    # the server sends pings while it reads a prompt, and the page then shows "reading ..."
    monkeypatch.setattr(app, "PING_S", 0.1)

    async def sent_events():
        job, events = Job(None, ""), []

        async def read():
            # the engine's `reading` events must not delay the pings
            for n in itertools.count():
                job.emit({"kind": "reading", "n_read": n, "n_all": 10**9})
                await asyncio.sleep(0.02)
                if len(events) == 2:
                    break
            job.emit({"kind": "read"})
            job.emit({"kind": "piece", "text": "a"})

        reading = asyncio.ensure_future(read())
        while not events or events[-1] is None:
            events.append(await app._next_event(job, ("reading", "read")))
        await reading
        return events

    *pings, event = asyncio.run(asyncio.wait_for(sent_events(), TIMEOUT_S))
    assert len(pings) >= 2
    assert set(pings) == {None}
    assert event == {"kind": "piece", "text": "a"}


STAND_IN = """
class Node { constructor(tag) { this.tag = tag; this.inside = []; }
  append(...inside) { this.inside.push(...inside); } setAttribute() {} }
globalThis.document = { createElement: (tag) => new Node(tag) };
const inside = (node) => [node.textContent, ...node.inside].filter((each) => each || each === 0);
const plain = (node) => typeof node === "string" ? node : [node.tag, ...inside(node).map(plain)];
const texts = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(texts.map((text) => elements(text).map(plain))));
"""


def page_texts(*texts):
    """Return the elements of each text. An element is a list of its tag and its contents."""
    script = (WEB / "markdown.js").read_text(encoding="utf-8") + STAND_IN
    done = subprocess.run(
        ["node", "-e", script],
        input=json.dumps(texts),
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


node = pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")


def code(text, name=""):
    return ["div", ["div", ["span", *[name] * bool(name)], ["button", "Copy"]], ["pre", ["code", text]]]


CASES = {
    "one\ntwo\n\nthree": [["p", "one\ntwo"], ["p", "three"]],
    "a **b *c* `d*`** e": [["p", "a ", ["strong", "b ", ["em", "c"], " ", ["code", "d*"]], " e"]],
    "2 * 3 * 4, a*b*c, snake_case, **, ``": [["p", "2 * 3 * 4, a*b*c, snake_case, **, ``"]],
    "`` a ` b ``": [["p", ["code", " a ` b "]]],
    "# Head\ntext": [["h3", "Head"], ["p", "text"]],
    "#tag": [["p", "#tag"]],
    "---": [["hr"]],
    "> a\n> - b": [["blockquote", ["p", "a"], ["ul", ["li", ["p", "b"]]]]],
    "```py\n- x\n\n<b>\n```\nafter": [code("- x\n\n<b>", "py"), ["p", "after"]],
    "~~~\n```\n~~~~": [code("```")],
    "```\nnot yet closed": [code("not yet closed")],
    "so:\n- a\n- b\n  c\n\n- d": [
        ["p", "so:"],
        ["ul", ["li", ["p", "a"]], ["li", ["p", "b\nc"]], ["li", ["p", "d"]]],
    ],
    "1. a\n   - b\n\t- c\n2. d": [
        ["ol", ["li", ["p", "a"], ["ul", ["li", ["p", "b"]], ["li", ["p", "c"]]]], ["li", ["p", "d"]]]
    ],
    "1. a\n\n   ```\n   x\n     y\n   ```\n\nend": [["ol", ["li", ["p", "a"], code("x\n  y")]], ["p", "end"]],
    "- a\n1. b": [["ul", ["li", ["p", "a"]]], ["ol", ["li", ["p", "b"]]]],
    "- a\n\n": [["ul", ["li", ["p", "a"]]]],
    "-": [["ul", ["li"]]],
    "| a | b |\n|---|:-:|\n| 1 | **2** |": [
        ["div", ["table", ["tr", ["th", "a"], ["th", "b"]], ["tr", ["td", "1"], ["td", ["strong", "2"]]]]]
    ],
    "a | b\nc": [["p", "a | b\nc"]],
    "<img src=x onerror=alert(1)> &amp;": [["p", "<img src=x onerror=alert(1)> &amp;"]],
}


@node
def test_markdown_becomes_elements_and_html_stays_text():
    assert dict(zip(CASES, page_texts(*CASES), strict=True)) == CASES


@node
def test_markdown_renderer_handles_any_text():
    rng = random.Random(1)
    signs = [
        "- ",
        "1. ",
        "  ",
        "\t",
        "\n",
        "\n\n",
        "`",
        "```",
        "*",
        "**",
        "> ",
        "|",
        "---",
        "#",
        "a",
        "\u4e16 ",
    ]
    texts = ["".join(rng.choices(signs, k=60)) for _ in range(3000)]
    texts += [sign * 20_000 for sign in signs] + [f"{sign}a " * 20_000 for sign in signs]
    texts += ["- a" + "\n" * 20_000 + "b", "> " * 5000 + "a", "\n".join("  " * n + "- a" for n in range(500))]
    elements = page_texts(*texts)
    letters = [(text, json.dumps(each)) for text, each in zip(texts, elements, strict=True)]
    # the page must show every \u4e16 of a text
    assert [text for text, each in letters if text.count("\u4e16") > each.count("\\u4e16")] == []
