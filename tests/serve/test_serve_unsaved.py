"""The operator hears once that chats cannot be stored."""

from __future__ import annotations

from kvtool.serve.http import metrics
from kvtool.serve.http.app import Site
from kvtool.serve.queue import JobQueue


def test_operator_is_warned_when_storing_begins_to_fail_or_fails_otherwise():
    lines = []
    site = Site("m", "h2o", JobQueue(1), say=lines.append)
    numbers = dict.fromkeys(("n_cached", "n_prompt", "n_written", "read_s", "write_s"), 1)
    full, missing = "No space left on device", "No such file or directory"
    for reason in (
        f"cannot write a: {full}",
        f"cannot write b: {full}",
        f"cannot write a: {missing}",
        "",
        missing,
    ):
        site.add_answer({**numbers, "kvtool": {"unsaved": reason} if reason else {}})
    assert lines == [
        f"chats are not stored: cannot write a: {full}",
        f"chats are not stored: cannot write a: {missing}",
        f"chats are not stored: {missing}",
    ]
    assert "\nkvtool_chats_unsaved_total 4\n" in metrics.text(site.counts, 0, 0, (0, 0), 0)
