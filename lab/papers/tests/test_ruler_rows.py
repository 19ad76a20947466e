"""RULER under many policies: its rows, and how they are measured."""

from __future__ import annotations

import json
import signal

import pytest

from kvtool.engine.sizes import pad
from kvtool.errors import InputError
from kvtool.measure import records
from kvtool.system import interrupt
from lab.papers import ruler
from lab.papers.ruler import PolicyRow
from tests import tiny


def refused(capsys, *words):
    """The one line with which the program ends."""
    with pytest.raises(SystemExit) as ended:
        ruler.main(list(words))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    *usage, line = printed.err.splitlines()
    assert not usage or usage[0].startswith("usage: ")
    return line


def test_rows_are_policies_with_shares_and_others():
    assert list(ruler.rows(["h2o", "kvzip"], [0.5, 0.9], ["recall@128", "full@q4_0"])) == [
        PolicyRow("full"),
        PolicyRow("h2o", 0.5),
        PolicyRow("h2o", 0.9),
        PolicyRow("kvzip", 0.5),
        PolicyRow("kvzip", 0.9),
        PolicyRow("recall", budget=128),
        PolicyRow("full", type_kv="q4_0"),
    ]


def test_a_policy_keeps_its_share_and_has_room_for_the_answer():
    policy = PolicyRow("h2o:sinks=4", 0.75).fit(1000, 50, 4096)
    assert policy.n_keep == 250
    assert policy.budget == 250 + 256
    assert policy.sinks == 4
    assert PolicyRow("recall", budget=128).fit(1000, 50, 4096).budget == 128
    assert PolicyRow("full").fit(1000, 50, 4096).budget == 1280


def test_the_full_cache_has_no_more_cells_than_the_context():
    assert PolicyRow("full").fit(1000, 50, 1100).budget == 1100
    assert PolicyRow("full", type_kv="q4_0").fit(1000, 150, 1100).budget == 1100
    with pytest.raises(InputError, match="a prompt of 1,100 tokens and its answer do not fit"):
        PolicyRow("h2o", 0.75).fit(1100, 50, 1100)


def test_a_prompt_too_short_to_be_compressed_is_an_error():
    with pytest.raises(InputError, match="25 % of 1,026 tokens .* nothing would be evicted"):
        PolicyRow("h2o", 0.25).fit(1026, 50, 4096)
    # one more token: the prompt exceeds its budget by one cell
    assert PolicyRow("h2o", 0.25).fit(1027, 50, 4096).budget == 1026


def test_only_what_streams_may_go_over_its_budget():
    assert not PolicyRow("h2o", 0.5).settings(1).over_budget
    assert not PolicyRow("full").settings(1).over_budget
    assert PolicyRow("recall", budget=128).settings(1).over_budget


def test_what_cannot_know_the_question_is_not_asked_twice():
    never = (
        PolicyRow("full"),
        PolicyRow("full", type_kv="q4_0"),
        PolicyRow("recall", budget=128),
        PolicyRow("kvzip", 0.5),
    )
    assert not any(row.knows("known") for row in never)
    both = PolicyRow("h2o", 0.5), PolicyRow("h2o:sinks=4", 0.5), PolicyRow("snapkv", budget=128)
    assert all(row.knows("known") for row in both)
    assert all(row.knows("after") for row in never + both)


MEASURE = "-m", "there-is-none.gguf", "--json", "out.jsonl"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--removed", "0.5,1"], "a share must be between 0 and 1, such as 0.75, got '1'"),
        (["--removed", "half"], "a share must be between 0 and 1, such as 0.75, got 'half'"),
        (["--items", "5:5"], "must be FROM:TO with FROM less than TO"),
        (["--items", "5"], "must be FROM:TO with FROM less than TO"),
        (["--question", "after,before"], "must be after, known or both"),
        (["--others", "recall"], "must be POLICY@CELLS or full@TYPE"),
        (["--others", "h2o@q4_0"], "only full takes a type; h2o takes a budget, as in h2o@128"),
        (["--others", "full@128"], "full evicts nothing"),
        (["--others", "full@q4_7"], "type_k must be one of"),
        (["--policies", "full"], "full evicts nothing"),
        (["--policies", "nope"], "unknown policy 'nope'"),
        (["--policies", "h2o:sinks=9999"], "sinks"),
        (["--policies", "h2o,recall"], "--policies: recall cannot compress a prompt that was read whole"),
        (["--policies", "recall"], "choose --others recall@128"),
        (["--policies", "corm"], "choose --others corm@128"),
        (["--length", "1000"], "25 % of 1,000 tokens"),
        ([], "there is no file there-is-none.gguf"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_read(capsys, words, said):
    assert said in refused(capsys, *MEASURE, *words)


def test_an_interrupt_ends_it_with_one_line(monkeypatch):
    def end(*_, message):
        raise SystemExit(message)

    monkeypatch.setattr(interrupt, "end", end)
    monkeypatch.setattr(ruler, "measure", lambda args: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit, match="stopped; what was measured is kept"):
        ruler.main(list(MEASURE))


def test_the_policies_unless_given_can_all_be_measured():
    rows = list(ruler.rows(ruler.POLICIES, [0.25, 0.97], ["recall@128", "full@q4_0"]))
    for row in rows:
        row.check(4096)
    assert {"tova", "expected:epsilon=0.02"} <= {row.policy for row in rows}


def test_it_is_measured_and_goes_on(tiny_model, tmp_path, capsys):
    path, out = tiny_model(chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=4096), tmp_path / "out.jsonl"
    size = ["--tasks", "niah_single_1,vt", "--length", "1700"]
    command = ["-m", str(path), *size, "--json", str(out)]
    rows = ["--policies", "h2o,kvzip,snapkv:heads=adaptive", "--removed", "0.5", "--others", "recall@128"]
    ruler.main([*command, *rows])
    results = records.read(out)
    labels = [(each["id"], each["question"], each["policy"]) for each in results]
    known = ["h2o", "snapkv:heads=adaptive"]
    after = ["full", "h2o", "kvzip", "snapkv:heads=adaptive", "recall"]
    of_item = [*(("after", name) for name in after), *(("known", name) for name in known)]
    ids = ["niah_single_1-1700-0", "vt-1700-0"]
    assert labels == [(item, *how) for item in ids for how in of_item]
    by_policy = {each["policy"]: each for each in results}
    assert by_policy["recall"]["archive_bytes"] > 0
    assert by_policy["h2o"]["evicted"] > 0
    # each row holds the cells of its budget
    shared = [each for each in results if each["policy"] in ("full", "h2o", "kvzip")]
    assert len({each["kv_bytes"] / pad(each["budget_cells"]) for each in shared}) == 1
    # a second run measures nothing again
    before = out.read_bytes()
    ruler.main([*command, *rows])
    assert out.read_bytes() == before
    # if a task is named twice, its items still have the same numbers
    names = ["--tasks", "niah_single_1,niah_single_1", "--items", "1:2", "--policies", "", "--others", ""]
    ruler.main([*command, *names, "--length", "700"])
    assert records.read(out)[-1]["id"] == "niah_single_1-700-1"
    capsys.readouterr()
    too_long = refused(capsys, *command, "--length", "5000")
    assert "--length must be at most the trained context, 4096" in too_long
    # what does not fit in the context is refused before anything is measured
    shares = ["--policies", "h2o,h2o:heads=adaptive", "--removed", "0.1", "--length", "3900"]
    assert "choose a budget of at most that, not 3766, which takes 7532" in refused(capsys, *command, *shares)
    assert not any(each["length"] == 3900 for each in records.read(out))
    needs = refused(capsys, *command, "--tasks", "qa_1")
    assert "--squad=FILE; --tasks=... leaves it out" in needs
    # the record has the references, like a record of kvtool eval
    assert json.loads(before.splitlines()[0])["references"]
