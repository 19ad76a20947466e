"""JSON lines that survive a killed process, and to which several processes append."""

from __future__ import annotations

import errno
import multiprocessing
import os

import pytest

from kvtool.errors import InputError, KvtoolError
from kvtool.measure import records


def test_appended_records_are_read_in_order(tmp_path):
    path = tmp_path / "out.jsonl"
    assert records.read(path) == []
    for i in range(3):
        records.append(path, {"i": i, "text": "a\nb"})
    assert records.read(path) == [{"i": i, "text": "a\nb"} for i in range(3)]


@pytest.mark.parametrize("rest", [b"", b"{", b'{"i": 7', b'{"i": 7}', b"x" * 10_000])
def test_incomplete_last_line_does_not_affect_other_records(tmp_path, rest):
    path = tmp_path / "out.jsonl"
    records.append(path, {"i": 0})
    with path.open("ab") as file:
        file.write(rest)
    assert records.read(path) == [{"i": 0}]
    records.append(path, {"i": 1})
    assert records.read(path) == [{"i": 0}, {"i": 1}]


def test_append_replaces_a_file_with_only_an_incomplete_line(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"i"')
    records.append(path, {"i": 1})
    assert records.read(path) == [{"i": 1}]


@pytest.mark.parametrize("line", ["no JSON", "[1]", "1", "", '{"a":' * 100_000])
def test_invalid_line_is_refused_with_its_number(tmp_path, line):
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"i": 0}}\n{line}\n{{"i": 1}}\n')
    with pytest.raises(InputError, match="line 2, is not a JSON object"):
        records.read(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        records.read(tmp_path)


def test_error_of_a_full_disk_names_the_file(monkeypatch, tmp_path):
    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "out.jsonl"
    with pytest.raises(KvtoolError, match=f"cannot write {path}: No space left on device"):
        records.append(path, {})


def _add(path, who):
    for i in range(20):
        records.append(path, {"who": who, "i": i, "long": "x" * 5000})


def test_appends_of_several_processes_are_all_kept(tmp_path):
    path = tmp_path / "out.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add, args=(path, who)) for who in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    pairs = {(record["who"], record["i"]) for record in records.read(path)}
    assert len(pairs) == len(records.read(path)) == 60


def test_keys_depend_on_values_but_not_on_their_order():
    names = ("policy", "params")
    one = records.key({"policy": "h2o", "params": {"a": 1, "b": 2}, "other": 1}, names)
    assert one == records.key({"params": {"b": 2, "a": 1}, "policy": "h2o"}, names)
    assert one != records.key({"params": {"b": 2, "a": 2}, "policy": "h2o"}, names)
    assert records.key({}, names) == records.key({"policy": None}, names)
