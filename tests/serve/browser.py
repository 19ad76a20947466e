"""A browser that opens the page of `kvtool serve`, and a stand-in for the server's answers."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Playwright, expect

from tests.blocking_policy import TIMEOUT_S
from tests.serve.subprocess_server import start_server

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "microsoft-edge")

# A stand-in for the page's `fetch`. A test answers a request by calling begin, say, end, refuse or lose.
FAKE = """() => {
  const realFetch = window.fetch;
  window.requests = [];
  window.fetch = (path, options) => {
    if (path === "props") return realFetch(path, options);
    window.requests.push({ headers: options.headers, body: JSON.parse(options.body) });
    return new Promise((resolve, reject) => {
      const abort = () => reject(new DOMException("gone", "AbortError"));
      options.signal.addEventListener("abort", abort);
      window.refuse = (status, body) => resolve(new Response(body, { status }));
      window.lose = () => reject(new TypeError("network"));
      window.begin = () => resolve(new Response(new ReadableStream({ start(to) {
        const bytes = new TextEncoder();
        window.say = (line) => to.enqueue(bytes.encode(line + "\\n\\n"));
        window.end = () => to.close();
        options.signal.addEventListener("abort", () => to.error(new DOMException("gone", "AbortError")));
      } })));
    });
  };
}"""


class Visitor:
    """A user of the page.

    site: address of the server.
    shots: folder for pictures, or None.
    """

    def __init__(self, browser: Browser, site: str, shots: Path | None) -> None:
        self.browser, self.site, self.shots = browser, site, shots

    @contextmanager
    def page(self, width: int = 1100, most: int = 24, fake: bool = False, **options: Any) -> Iterator[Page]:
        """Open the page in a new browser context and yield it.

        Raises AssertionError at the end of the block if a script failed, if the page's security policy was
        violated, or if the page sent a request to another host than the server.
        """
        context = self.browser.new_context(viewport={"width": width, "height": 760}, **options)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_S * 1000)
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console",
            lambda message: faults.append(message.text) if "Content Security" in message.text else None,
        )
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((self.site, "data:")) else faults.append(request.url)
            ),
        )
        settings = json.dumps({"most": str(most), "temperature": "0"})
        page.add_init_script(f"localStorage['kvtool.settings'] ??= {json.dumps(settings)}")
        if fake:
            page.add_init_script(f"({FAKE})()")
        page.goto(self.site)
        expect(page.locator("#about")).to_contain_text("tokens per KV head")
        try:
            yield page
            assert page.title() != "broken"
            assert page.locator("img").count() == 0
            assert faults == [], faults
        finally:
            context.close()

    def shot(self, page: Page, name: str) -> None:
        if self.shots:
            page.screenshot(path=self.shots / f"{name}.png")


def send(page: Page, text: str, wait: bool = True) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")
    if wait:
        wait_for_reply(page)


def wait_for_reply(page: Page) -> None:
    """Wait for the end of a reply."""
    expect(page.locator(".assistant .foot").last).to_contain_text("tokens/s", timeout=TIMEOUT_S * 1000)
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=TIMEOUT_S * 1000)


def piece(
    page: Page, text: str, first: bool = False, end: bool = False, name: str = "content", **more: Any
) -> None:
    """Let the fake server send a piece of a reply."""
    if first:
        page.evaluate("begin()")
    line = json.dumps(
        {"choices": [{"delta": {name: text}, "finish_reason": "stop" if end else None}], **more}
    )
    page.evaluate("(line) => say(line)", f"data: {line}")
    if end:
        page.evaluate("say('data: [DONE]')")
        page.evaluate("end()")


def wait_for_request(page: Page, n: int) -> None:
    """Wait for the n-th request to the fake server.

    Playwright's wait_for_function does not work here: it uses eval, which the page's security policy forbids.
    """
    while page.evaluate("requests.length") < n:
        page.wait_for_timeout(50)


def refuse(page: Page, status: int, words: str) -> None:
    page.evaluate(
        "([status, body]) => refuse(status, body)", [status, json.dumps({"error": {"message": words}})]
    )


def answer(site: str, text: str) -> str:
    """Ask the server directly, without the page. Return the reply."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 4}).encode()
    with urllib.request.urlopen(f"{site}v1/chat/completions", body, timeout=TIMEOUT_S) as response:
        reply: str = json.load(response)["choices"][0]["message"]["content"]
    return reply


@contextmanager
def server(model: str) -> Iterator[str]:
    """Start a server. Yield its address, with a slash at the end."""
    with start_server(model, "--policy", "h2o", "--budget", "128") as process:
        yield f"{process.url}/"


def launch(playwright: Playwright) -> Browser:
    """Launch the system's browser, or else Playwright's."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    # Chromium's sandbox does not work for root
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=path, args=flags)
