"""Use the page of kvtool serve in a real browser, as a person would.

    python -m tests.tools.check_page
    python -m tests.tools.check_page --shots DIR --only stop,edit

The program starts a server with a small model, and prints a line per check. The exit status is 1 if a check
fails. The program needs Playwright, which `make check-page` installs, and a browser of the Chromium family:
the system's (Debian: apt install chromium) or Playwright's (.venv/bin/playwright install chromium). --shots
writes pictures to look at.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Dialog, expect, sync_playwright

from tests.serve.browser import (
    Visitor,
    answer,
    launch,
    piece,
    refuse,
    send,
    server,
    wait_for_reply,
    wait_for_request,
)

BAD = "<img src=x onerror=\"document.title='broken'\">"
WHERE = r"([\d.]+ % in the cache, [\d.]+ % forgotten|each KV head keeps [\d.]+ %, [\d.]+ % is forgotten)"
STATUS = re.compile(rf"[\d,]+ tokens: {WHERE} · cache [\d.]+ MiB · [\d.]+ tokens/s")


CHECKS: dict[str, Callable[[Visitor], None]] = {}


def check(function: Callable[[Visitor], None]) -> Callable[[Visitor], None]:
    CHECKS[function.__name__] = function
    return function


@check
def streams(visit: Visitor) -> None:
    """Enter sends, Shift+Enter begins a new line, and the reply comes piece by piece."""
    with visit.page(most=60) as page:
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
        page.keyboard.type("Tell me")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("about tea.")
        page.keyboard.press("Enter")
        expect(page.locator(".user .body")).to_have_text("Tell me\nabout tea.", use_inner_text=True)
        expect(page.get_by_label("Message", exact=True)).to_have_value("")
        lengths: list[int] = []
        while page.get_by_role("button", name="Stop").is_visible():
            lengths.append(len(page.locator(".assistant .body").text_content() or ""))
            page.wait_for_timeout(20)
        assert len(set(lengths)) > 5, lengths
        assert lengths == sorted(lengths), lengths
        expect(page.locator(".assistant .foot")).to_have_text(STATUS)
        expect(page.get_by_role("button", name="Send")).to_be_visible()


@check
def input_methods(visit: Visitor) -> None:
    """Enter does not send the message while it is used to accept a word of an input method."""
    with visit.page(fake=True) as page:
        text = page.get_by_label("Message", exact=True)
        text.fill("\u65e5\u672c")
        event = {"key": "Enter", "isComposing": True, "bubbles": True, "cancelable": True}
        text.dispatch_event("keydown", event)
        assert page.locator("article").count() == 0
        text.dispatch_event("keydown", event | {"isComposing": False})
        expect(page.locator("article")).to_have_count(2)


@check
def stop(visit: Visitor) -> None:
    """The button Stop ends a reply, keeps its beginning, and frees the server."""
    with visit.page(most=2000) as page:
        page.get_by_label("Message", exact=True).fill("Write a very long story.")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".assistant .body")).to_have_text(re.compile(r".{40}", re.S))
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".assistant .foot")).to_have_text("Stopped")
        text = page.locator(".assistant .body").inner_text()
        began = time.monotonic()
        assert answer(visit.site, "Hello")
        assert time.monotonic() - began < 30
        assert page.locator(".assistant .body").inner_text() == text
        # the Escape key also stops a reply
        send(page, "Go on", wait=False)
        expect(page.locator(".assistant .body").last).to_have_text(re.compile(r".{20}", re.S))
        page.keyboard.press("Escape")
        expect(page.locator(".assistant .foot").last).to_have_text("Stopped")


@check
def edit(visit: Visitor) -> None:
    """An edited message is sent with the history before it. The page asks before it deletes later messages.

    The server restores this history from a snapshot.
    """
    with visit.page() as page:
        dialogs = []

        def reply(dialog: Dialog) -> None:
            dialogs.append(dialog.message)
            if len(dialogs) == 1:
                dialog.dismiss()
            else:
                dialog.accept()

        page.on("dialog", reply)
        for text in ("My name is Ann.", "I live in Oslo.", "I like tea."):
            send(page, text)
        responses = []
        page.on("response", lambda response: responses.append(response))
        page.get_by_label("Edit your message").nth(1).click()
        area = page.locator(".editing textarea")
        expect(area).to_be_focused()
        expect(area).to_have_value("I live in Oslo.")
        area.press("Escape")
        expect(page.locator(".user .body")).to_have_text(
            ["My name is Ann.", "I live in Oslo.", "I like tea."]
        )
        page.get_by_label("Edit your message").nth(1).click()
        area.fill("I live in Rome.")
        area.press("Enter")
        # the user has answered no
        expect(area).to_have_value("I live in Rome.")
        expect(page.locator("article")).to_have_count(6)
        assert responses == []
        area.press("Enter")
        wait_for_reply(page)
        assert dialogs == ["Delete all messages after this one?"] * 2
        expect(page.locator(".user .body")).to_have_text(["My name is Ann.", "I live in Rome."])
        expect(page.locator(".assistant")).to_have_count(2)
        messages = responses[0].request.post_data_json["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "user"], messages
        assert messages[-1]["content"] == "I live in Rome."
        assert re.search(r'"cache_n": [1-9]', responses[0].text())
        # the last message has no later messages
        page.get_by_label("Edit your message").last.click()
        area.press("Enter")
        wait_for_reply(page)
        assert len(dialogs) == len(responses) == 2


@check
def retry(visit: Visitor) -> None:
    """The button for a retry asks for a new last reply."""
    with visit.page() as page:
        send(page, "Say something.")
        send(page, "And more.")
        with page.expect_request("**/v1/chat/completions") as request:
            page.get_by_label("Write the reply again").last.click()
        wait_for_reply(page)
        messages = request.value.post_data_json["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "user"], messages
        expect(page.locator("article")).to_have_count(4)
        expect(page.get_by_label("Write the reply again").first).to_be_hidden()


@check
def chats(visit: Visitor) -> None:
    """Chats are kept and can be deleted. Each chat has its own name and its own session."""
    with visit.page() as page:
        names = []
        page.on("request", lambda request: names.append(request.headers.get("x-session-id")))
        send(page, "The first of all my chats is about tea and cake")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("article")).to_have_count(0)
        send(page, "Second chat")
        items = page.get_by_label("Chats", exact=True).locator("li button:first-child")
        expect(items).to_have_text(["Second chat", "The first of all my chats is"])
        items.nth(1).click()
        expect(page.locator(".user .body")).to_have_text(["The first of all my chats is about tea and cake"])
        send(page, "More of it")
        expect(items).to_have_text(["The first of all my chats is", "Second chat"])
        first, second, third = (name for name in names if name)
        assert first == third != second, names
        page.reload()
        expect(page.locator(".user .body")).to_have_count(2)
        expect(page.locator("li:has([aria-current]) button").first).to_have_text(
            "The first of all my chats is"
        )
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_label("Delete the chat: The first").click()
        expect(items).to_have_text(["Second chat"])
        expect(page.locator(".user .body")).to_have_text(["Second chat"])
        stored = page.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('kvtool.chat.'))")
        assert stored == [f"kvtool.chat.{second}"], stored


@check
def goes_on_elsewhere(visit: Visitor) -> None:
    """A reply continues while another chat is shown."""
    with visit.page(fake=True) as page:
        send(page, "one", wait=False)
        piece(page, "half", first=True)
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        piece(page, " and half", end=True)
        page.get_by_role("button", name="one", exact=True).click()
        expect(page.locator(".assistant .body")).to_have_text("half and half")


@check
def held(visit: Visitor) -> None:
    """The tokens in the cache are shown one by one, with a legend. Arrow keys move from token to token."""
    with visit.page() as page:
        page.get_by_role("checkbox", name="What is held").check()
        panel = page.get_by_role("region", name="What is held")
        expect(panel).to_contain_text("The next reply will show")
        send(page, "The quick brown fox " * 60 + BAD)
        tokens = page.locator("#tokens")
        assert BAD in tokens.text_content()
        expect(panel).to_contain_text(
            re.compile(r"[\d,]+ tokens: \d+ held by every row, \d+ by some, \d+ forgotten")
        )
        expect(panel).to_contain_text("Held by up to")
        levels = page.evaluate(
            "[...new Set([...document.querySelectorAll('#tokens span')].map((x) => x.className))]"
        )
        assert len(levels) > 3, levels
        assert set(levels) <= {f"s{n}" for n in range(9)}, levels
        titles = page.evaluate("[...document.querySelectorAll('#tokens .s3')].map((x) => x.title)")
        assert titles
        assert all(re.fullmatch(r"held by [\d.]+ % of the rows", title) for title in titles), titles
        tokens.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(page.locator("#token")).to_have_text(re.compile(r'^".*": held by [\d.]+ % of the rows$'))
        expect(page.locator("#tokens .here")).to_have_count(1)
        visit.shot(page, "held")
        page.get_by_role("checkbox", name="What is held").uncheck()
        expect(panel).to_be_hidden()


@check
def archived(visit: Visitor) -> None:
    """Archived tokens have their own colour in the legend, and the status gives their number."""
    with visit.page(fake=True) as page:
        page.get_by_role("checkbox", name="What is held").check()
        send(page, "hi", wait=False)
        share = {"text": ["a", "b\n", "c"], "held": [0, 0, 1], "archived": [False, True, False]}
        counts = {"tokens": 2000, "held": 500, "archived": 700, "forgotten": 800, "cache_bytes": 2**20}
        piece(page, "yes", first=True)
        stats = counts | {"archive_bytes": 9, "share": share}
        piece(page, "", end=True, kvtool=stats, timings={"predicted_per_second": 9.87})
        shares = "25.0 % in the cache, 35.0 % archived, 40.0 % forgotten"
        line = f"2,000 tokens: {shares} · cache 1.0 MiB · 9.9 tokens/s"
        expect(page.locator(".foot").last).to_have_text(line)
        expect(page.locator("#tokens .archived")).to_have_text("b\u23ce", use_inner_text=True)
        expect(page.locator("#counts")).to_have_text(
            "The last 3 of 2,000 tokens: 1 held by every row, 0 by some, 1 archived, 1 forgotten"
        )
        expect(page.locator("#legend .archived")).to_be_visible()


@check
def reading(visit: Visitor) -> None:
    """While a long prompt is read, the page shows the progress in percent. Thoughts are folded."""
    with visit.page(fake=True) as page:
        send(page, "hi", wait=False)
        foot = page.locator(".assistant .foot")
        expect(foot).to_have_text("Waiting ...")
        page.evaluate("begin(); say(': ping')")
        expect(foot).to_have_text("Reading ...")
        for n, percent in ((1000, 0), (3500, 50), (5999, 99)):
            progress = {"total": 6000, "cache": 1000, "processed": n, "time_ms": 5}
            line = json.dumps({"choices": [{"delta": {}}], "prompt_progress": progress})
            page.evaluate("(line) => say(line)", f"data: {line}")
            expect(foot).to_have_text(f"Reading: {percent} % of 5,000 tokens")
        visit.shot(page, "reading")
        piece(page, f"hm {BAD}", name="reasoning_content")
        thought = page.locator(".assistant .thought")
        expect(thought.locator("summary")).to_have_text("Thinking ...")
        expect(thought.locator("p")).to_be_hidden()
        thought.locator("summary").click()
        expect(thought.locator("p")).to_have_text(f"hm {BAD}")
        piece(page, "yes", end=True)
        expect(thought.locator("summary")).to_have_text("Thoughts")
        expect(thought.locator("p")).to_be_visible()
        expect(page.locator(".assistant .body")).to_have_text("yes")
        send(page, "more", wait=False)
        assert page.evaluate("requests.at(-1).body.messages[1]") == {"role": "assistant", "content": "yes"}


@check
def files(visit: Visitor) -> None:
    """Text files are added to the message, with their sizes. Other files are refused by name."""
    with visit.page(fake=True) as page:
        file_input = page.locator("#file")
        long = "tea\r\n```\ncake\n```\n" * 100
        notes = {"name": "notes.txt", "mimeType": "text/plain", "buffer": long.encode()}
        wide = {"name": "wide.txt", "mimeType": "text/plain", "buffer": "\ufeff\u00e9\n".encode("utf-16-le")}
        file_input.set_input_files([notes, wide])
        items = page.get_by_label("Attached files").locator("li")
        expect(items).to_have_text(["notes.txt, 1.8 KiB\u00d7", "wide.txt, 6 B\u00d7"])
        file_input.set_input_files(
            [
                {"name": "photo.png", "mimeType": "image/png", "buffer": b"\x89PNG\r\n\x1a\n\0\0"},
                {"name": "big.log", "mimeType": "text/plain", "buffer": b"x" * (3 * 2**20)},
            ]
        )
        expect(page.get_by_role("alert")).to_have_text(
            "photo.png is not a text file \u00b7 big.log has 3.0 MiB; a file may have 2.0 MiB"
        )
        expect(items).to_have_count(2)
        visit.shot(page, "files")
        page.get_by_label("Remove the file wide.txt").click()
        send(page, "What is in it?", wait=False)
        expect(page.get_by_role("alert")).to_have_text("")
        expect(page.locator(".user .files li")).to_have_text(["notes.txt, 1.8 KiB"])
        expect(page.locator(".user .body")).to_have_text("What is in it?")
        expect(items).to_have_count(0)
        (message,) = page.evaluate("requests[0].body.messages")
        text = long.replace("\r\n", "\n")
        assert message["content"] == f"notes.txt:\n````\n{text}````\n\nWhat is in it?", message["content"][
            :90
        ]
        piece(page, "Tea.", first=True, end=True)
        # the file stays in the message when its words are edited, even after a reload
        page.reload()
        page.get_by_label("Edit your message").click()
        page.locator(".editing textarea").fill("And now?")
        page.locator(".editing textarea").press("Enter")
        wait_for_request(page, 1)
        (message,) = page.evaluate("requests[0].body.messages")
        assert message["content"].endswith("````\n\nAnd now?")
        # a message may consist of only a file
        page.get_by_role("button", name="New chat").click()
        file_input.set_input_files([notes])
        page.get_by_role("button", name="Send").click()
        wait_for_request(page, 2)
        assert page.evaluate("requests[1].body.messages[0].content").startswith("notes.txt:")
        expect(page.get_by_label("Chats", exact=True).locator("li button").first).to_have_text("notes.txt")


@check
def exported(visit: Visitor) -> None:
    """A chat is downloaded as Markdown or JSON, with its system prompt, thoughts and files."""
    with visit.page(fake=True) as page:
        expect(page.get_by_role("button", name="Export this chat")).to_be_disabled()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.keyboard.press("Escape")
        page.locator("#file").set_input_files([{"name": "a.txt", "mimeType": "text/plain", "buffer": b"one"}])
        send(page, f"Tea? / {BAD}", wait=False)
        piece(page, "hm\nhm", first=True, name="reasoning_content")
        piece(page, "**Yes.**", end=True)
        expect(page.locator(".assistant strong")).to_have_text("Yes.")
        question = f"a.txt:\n```\none\n```\n\nTea? / {BAD}"
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": question},
            {"role": "assistant", "content": "**Yes.**", "reasoning_content": "hm\nhm"},
        ]
        texts = {}
        for name in ("JSON", "Markdown"):
            page.get_by_role("button", name="Export this chat").click()
            visit.shot(page, "export")
            with page.expect_download() as saved:
                page.get_by_role("button", name=name).click()
            texts[name] = Path(saved.value.path()).read_text(encoding="utf-8")
            assert saved.value.suggested_filename.startswith("Tea-img-src-x"), saved.value.suggested_filename
            expect(page.get_by_role("dialog")).to_have_count(0)
        assert json.loads(texts["JSON"])["messages"] == messages
        body = f"## You\n\n{question}\n\n## Model\n\n> hm\n> hm\n\n**Yes.**\n"
        assert texts["Markdown"].endswith(f"\n\n## System prompt\n\nBe brief.\n\n{body}"), texts["Markdown"]
        assert texts["Markdown"].startswith("# Tea? / <img")


@check
def caches(visit: Visitor) -> None:
    """The line at the top shows the number of caches and the size of each."""
    with visit.page() as page:
        expect(page.locator("#about")).to_have_text(re.compile(r" \u00b7 cache [\d.]+ MiB$"))
        of_one = page.locator("#about .wide").inner_text().removeprefix(" \u00b7 cache ")
        send(page, "hi")
        expect(page.locator(".foot").last).to_contain_text(f"cache {of_one} ")
        props = json.dumps(page.evaluate("props") | {"n_caches": 2, "cache_bytes": 2 * 2**20})
        assert page.evaluate(f"cacheOf({props})") == "2 caches of 1.0 MiB"


@check
def html(visit: Visitor) -> None:
    """HTML from the user, the model or the server is always shown as text."""
    text = f"{BAD}\n\n- {BAD}\n\n**{BAD}** `{BAD}`\n\n```{BAD}\n{BAD}\n```\n\n"
    text += f"|{BAD}|b|\n|-|-|\n|{BAD}|c|\n\n# {BAD}"
    with visit.page(fake=True) as page:
        send(page, BAD, wait=False)
        piece(page, text, first=True, end=True)
        expect(page.locator(".user .body")).to_have_text(BAD)
        assert page.locator(".assistant .body").text_content().count(BAD) == 9
        assert page.locator("nav li button").first.text_content() in BAD
        page.get_by_role("checkbox", name="Plain text").check()
        assert page.locator(".assistant .body").text_content() == text
        page.reload()
        expect(page.locator(".user .body")).to_have_text(BAD)
        send(page, "x", wait=False)
        refuse(page, 400, BAD)
        expect(page.locator(".foot.error")).to_contain_text(BAD)


@check
def markdown(visit: Visitor) -> None:
    """Markdown is rendered, code can be copied, and a selection stays while a reply comes."""
    with visit.page(fake=True) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        send(page, "hi", wait=False)
        piece(page, "Some **bold** words.\n\n```py\nprint('a')\n```\n\n1. one\n", first=True)
        page.locator(".assistant strong").wait_for()
        page.evaluate("getSelection().selectAllChildren(document.querySelector('.assistant strong'))")
        piece(page, "2. two `code`\n", end=True)
        expect(page.locator(".assistant li")).to_have_text(["one", "two code"])
        assert page.evaluate("getSelection().toString()") == "bold"
        page.get_by_label("Copy code").click()
        expect(page.get_by_label("Copy code")).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == "print('a')"
        page.get_by_label("Copy the reply").click()
        assert page.evaluate("navigator.clipboard.readText()").startswith("Some **bold** words.")
        visit.shot(page, "markdown")


@check
def errors(visit: Visitor) -> None:
    """Each error is shown as one plain line with a button for a retry."""
    with visit.page(fake=True) as page:
        foot = page.locator(".foot").last
        retry_button = page.locator(".foot").get_by_role("button", name="Retry")
        send(page, "hi", wait=False)
        refuse(page, 429, "the queue is full (64 waiting); try again later")
        expect(foot).to_have_text("The queue is full (64 waiting); try again laterRetry")
        visit.shot(page, "error")
        retry_button.click()
        page.evaluate("lose()")
        expect(foot).to_contain_text("There is no connection to the server")
        retry_button.click()
        page.evaluate("refuse(502, '<html>bad gateway')")
        expect(foot).to_contain_text("The server answered with status 502")
        retry_button.click()
        piece(page, "half", first=True)
        page.evaluate("end()")
        expect(foot).to_have_text("The connection was lost before the reply ended")
        expect(page.locator(".assistant .body")).to_have_text("half")
        page.get_by_label("Write the reply again").click()
        page.evaluate("begin(); say('data: ' + JSON.stringify({ error: { message: 'it has failed' } }))")
        expect(foot).to_have_text("It has failedRetry")
        # a message that got no reply is sent again together with the next message
        send(page, "there", wait=False)
        assert page.evaluate("requests.at(-1).body.messages") == [{"role": "user", "content": "hi\n\nthere"}]


@check
def loading(visit: Visitor) -> None:
    """While the model is loading, the page retries."""
    with visit.page(fake=True) as page:
        send(page, "hi", wait=False)
        refuse(page, 503, "the model is being loaded")
        expect(page.locator(".foot").last).to_have_text("The model is being loaded ...")
        wait_for_request(page, 2)
        piece(page, "yes", first=True, end=True)
        expect(page.locator(".assistant .body")).to_have_text("yes")


@check
def keys(visit: Visitor) -> None:
    """If the server wants a key, the page asks for it. The key is kept for the browser tab only."""
    with visit.page(fake=True) as page:
        send(page, "hi", wait=False)
        refuse(page, 401, "the API key is wrong or missing")
        dialog = page.get_by_role("dialog", name="This server needs an API key")
        expect(dialog).to_be_visible()
        visit.shot(page, "key")
        page.keyboard.press("Escape")
        expect(page.locator(".foot").last).to_contain_text("The API key is wrong or missing")
        page.locator(".foot").get_by_role("button", name="Retry").click()
        refuse(page, 401, "the API key is wrong or missing")
        page.get_by_label("API key (kept").fill("secret")
        page.keyboard.press("Enter")
        wait_for_request(page, 3)
        assert page.evaluate("requests[2].headers.Authorization") == "Bearer secret"
        assert page.evaluate("sessionStorage['kvtool.key']") == "secret"
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


@check
def settings(visit: Visitor) -> None:
    """System prompt, temperature and token limit are sent and kept. A chat keeps its own system prompt."""
    with visit.page(fake=True) as page:
        send(page, "old", wait=False)
        piece(page, "yes", first=True, end=True)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Token limit").fill("77")
        visit.shot(page, "settings")
        page.keyboard.press("Escape")
        page.reload()
        send(page, "more", wait=False)
        body = page.evaluate("requests[0].body")
        assert (body["temperature"], body["max_tokens"]) == (0.5, 77)
        assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
        assert "kvtool" not in body
        page.get_by_role("button", name="New chat").click()
        send(page, "new", wait=False)
        messages = page.evaluate("requests[1].body.messages")
        assert messages[0] == {"role": "system", "content": "Be brief."}, messages


@check
def closed(visit: Visitor) -> None:
    """A page that is closed during a reply and opened again shows the reply so far, marked as unfinished."""
    with visit.page(fake=True) as page:
        send(page, "hi", wait=False)
        piece(page, "half", first=True)
        page.reload()
        expect(page.locator(".assistant .body")).to_have_text("half")
        expect(page.locator(".foot").last).to_have_text("Unfinished: its tab was closed, or is still writing")


@check
def narrow(visit: Visitor) -> None:
    """The page fits into 360 pixels, light and dark.

    The list of chats can be opened and closed by keyboard.
    """
    with visit.page(width=360) as page:
        page.get_by_role("checkbox", name="What is held").check()
        send(page, "```\n" + "long" * 40 + "\n```")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            visit.shot(page, f"narrow-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("document.querySelector('main').offsetWidth") == 360
        rights = "(x) => x.getBoundingClientRect().right"
        edges = page.evaluate(f"[...document.querySelectorAll('main button, textarea')].map({rights})")
        assert max(edges) <= 360, edges
        menu = page.get_by_role("button", name="Chats")
        expect(page.get_by_role("button", name="New chat")).to_be_hidden()
        menu.press("Enter")
        expect(page.get_by_role("button", name="New chat")).to_be_focused()
        expect(menu).to_have_attribute("aria-expanded", "true")
        visit.shot(page, "narrow-list")
        page.keyboard.press("Escape")
        expect(menu).to_be_focused()
        expect(page.get_by_role("button", name="New chat")).to_be_hidden()


@check
def keyboard(visit: Visitor) -> None:
    """Every control has a name and can be reached with the Tab key."""
    with visit.page(fake=True) as page:
        send(page, "hi", wait=False)
        piece(page, "```\nx\n```", first=True, end=True)
        page.get_by_label("Copy the reply").wait_for()
        labels = set()
        for _ in range(25):
            page.keyboard.press("Tab")
            labels.add(
                page.evaluate(
                    "(document.activeElement.ariaLabel || document.activeElement.labels?.[0]?.textContent"
                    " || document.activeElement.textContent).trim().slice(0, 40)"
                )
            )
        expected_labels = {
            "New chat",
            "Export this chat",
            "Attach a file",
            "hi",
            "Delete the chat: hi",
            "Settings",
        }
        expected_labels |= {"Chat", "Copy your message", "Edit your message", "Copy code", "Copy the reply"}
        expected_labels |= {"Write the reply again", "Message", "Send", "What is held", "Plain text"}
        assert expected_labels <= labels, expected_labels - labels
        nameless = page.evaluate(
            "[...document.querySelectorAll('button, input, textarea')].filter((x) => !x.ariaLabel"
            " && !x.labels?.[0]?.textContent && !x.textContent.trim()).map((x) => x.outerHTML)"
        )
        assert nameless == [], nameless


@check
def pictures(visit: Visitor) -> None:
    """Pictures for --shots: a chat on a desktop, light and dark."""
    with visit.page(most=120) as page:
        visit.shot(page, "empty")
        page.get_by_role("checkbox", name="What is held").check()
        send(page, "How do I make tea? Answer in a list.")
        send(page, "Write a Python function that adds two numbers.")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            visit.shot(page, f"desktop-{scheme}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--shots", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", help="names of checks, with commas")
    args = parser.parse_args()
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    names = args.only.split(",") if args.only else [*CHECKS][: None if args.shots else -1]
    failed = 0
    with server(args.model) as site, sync_playwright() as playwright:
        expect.set_options(timeout=20_000)
        visit = Visitor(launch(playwright), site, args.shots)
        for name in names:
            began = time.monotonic()
            try:
                CHECKS[name](visit)
                outcome = "ok"
            except Exception:  # noqa: BLE001
                failed += 1
                outcome = f"FAILED\n{traceback.format_exc()}"
            print(f"{name:18} {time.monotonic() - began:5.1f} s  {outcome}", flush=True)
        visit.browser.close()
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
