"""JSON lines that survive a killed process, and to which several processes append."""

from __future__ import annotations

import multiprocessing

import pytest

from kvtool.errors import InputError
from kvtool.measure import records
from tests.held import PATIENCE_S


def test_what_is_added_is_read_in_order(tmp_path):
    path = tmp_path / "out.jsonl"
    assert records.read(path) == []
    for i in range(3):
        records.append(path, {"i": i, "text": "a\nb"})
    assert records.read(path) == [{"i": i, "text": "a\nb"} for i in range(3)]


@pytest.mark.parametrize("rest", [b"", b"{", b'{"i": 7', b'{"i": 7}', b"x" * 10_000])
def test_half_a_line_is_left_out_and_spoils_nothing(tmp_path, rest):
    path = tmp_path / "out.jsonl"
    records.append(path, {"i": 0})
    with path.open("ab") as file:
        file.write(rest)
    assert records.read(path) == [{"i": 0}]
    records.append(path, {"i": 1})
    assert records.read(path) == [{"i": 0}, {"i": 1}]


def test_a_file_that_is_only_half_a_line_starts_over(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"i"')
    records.append(path, {"i": 1})
    assert records.read(path) == [{"i": 1}]


@pytest.mark.parametrize("line", ["no JSON", "[1]", "1", "", '{"a":' * 100_000])
def test_any_other_line_is_refused_by_its_number(tmp_path, line):
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"i": 0}}\n{line}\n{{"i": 1}}\n')
    with pytest.raises(InputError, match="line 2, is not a JSON object"):
        records.read(path)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        records.read(tmp_path)


def _add(path, who):
    for i in range(20):
        records.append(path, {"who": who, "i": i, "long": "x" * 5000})


def test_several_processes_lose_nothing(tmp_path):
    path = tmp_path / "out.jsonl"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add, args=(path, who)) for who in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    pairs = {(record["who"], record["i"]) for record in records.read(path)}
    assert len(pairs) == len(records.read(path)) == 60


def test_rewriting_replaces_all(tmp_path):
    path = tmp_path / "out.jsonl"
    records.append(path, {"i": 0})
    records.rewrite(path, lambda there: [{"i": 2}, {"i": 1}, *there])
    assert records.read(path) == [{"i": 2}, {"i": 1}, {"i": 0}]
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]


def _rewrite(path, began, is_asked):
    def slowly(there):
        began.set()
        assert is_asked.wait(PATIENCE_S)
        return there

    records.rewrite(path, slowly)


def test_what_is_added_while_a_file_is_rewritten_is_not_lost(tmp_path):
    path, context = tmp_path / "out.jsonl", multiprocessing.get_context("spawn")
    records.append(path, {"i": 0})
    began, is_asked = context.Event(), context.Event()
    process = context.Process(target=_rewrite, args=(path, began, is_asked))
    process.start()
    assert began.wait(PATIENCE_S)
    is_asked.set()
    records.append(path, {"i": 1})
    process.join()
    assert records.read(path) == [{"i": 0}, {"i": 1}]


def test_keys_tell_values_apart_and_not_their_order():
    names = ("policy", "params")
    one = records.key({"policy": "h2o", "params": {"a": 1, "b": 2}, "other": 1}, names)
    assert one == records.key({"params": {"b": 2, "a": 1}, "policy": "h2o"}, names)
    assert one != records.key({"params": {"b": 2, "a": 2}, "policy": "h2o"}, names)
    assert records.key({}, names) == records.key({"policy": None}, names)
