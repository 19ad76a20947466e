"""A small part of the fuzzing. `make fuzz` runs all of it."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import fuzz_api, fuzz_gguf


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits memory as Linux counts it")
def test_damaged_gguf_files_end_in_time_with_at_most_one_line(share_of):
    outcomes, faults = fuzz_gguf.run(share_of(50, 100))
    assert not faults
    # kvtool's reader of headers refuses some files. llama.cpp refuses others. Some are not refused at all.
    for outcome in ("3, 3", "0, 3", "0, 0"):
        assert outcomes[f"models show, generate: {outcome}"] >= 3, outcomes


def test_random_library_calls_succeed_or_are_refused(share_of):
    counts = fuzz_api.run(share_of(800, 1500))
    archive = ("archive", "archive_file", "base", "forget", "rewind", "get_archive", "set_archive")
    for name in (
        *("apply", "decode", "enable", "read", "read_keys", "resize", "seen", "write", *archive),
        *("get_archive_table", "set_archive_table", "clusters", "get_clusters", "set_clusters", "seal"),
    ):
        for what in ("done", "refused"):
            assert counts[name, what] >= 3, (name, what, counts)
