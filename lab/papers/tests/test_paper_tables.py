"""The tables of the papers' experiments show the records' numbers and the right tests."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvtool.measure import records, statistics
from lab.benchmarks.blocks import joined
from lab.papers import index, places, tables, verdicts
from lab.papers.commands import CompareRun
from lab.papers.experiments import EXPERIMENTS, RUNS
from lab.papers.experiments.kinds import ScoreTable
from lab.papers.samples import SCORES
from lab.papers.tests.made_up import VERSIONS, lines
from lab.papers.verdicts import Verdict


def counted(stored, table):
    """Count the paper's differences: same direction, other direction, unclear, untested."""
    return verdicts.verdict(places.samples(stored, table), table)


def test_a_table_of_tasks_has_a_score_of_each(measured):
    tasks = {"qa": "logp", "stream": "nll"}
    table = ScoreTable(
        "", ("task",), "full", names={"stream": "stream, perplexity"}, scores=tasks, title="All"
    )
    stored = [
        {"label": label, "budget": budget, "task": task, "of": "f", "items": ["a", "b", "c"]}
        | {"scores": {name: [0.0, other, other]}, "seconds": 1}
        | VERSIONS
        for task, name, other in (("qa", "logp", -3.0), ("stream", "nll", 0.3))
        for label, budget, other in (("full", None, 0.0), ("h2o", "20%", other))
    ]
    # a line of a task that the table does not show
    stored.append(stored[0] | {"task": "choice", "scores": {"acc": [1, 1, 1]}})
    shown = measured(stored, table, model="")
    assert shown.split("\n\n")[1:3] == [
        "All:",
        "| policy | qa | stream, perplexity |\n| --- | ---: | ---: |\n"
        # equal scores are shown without an error
        "| `full` | 0.00 | 1.00 |\n"
        # three items are too few for a test
        "| `h2o` | -2.00 ±1.00 | 1.22 ±0.12 |",
    ]


def test_only_what_stands_between_the_marks_is_made_anew(measured):
    measured(lines(h2o__64={"f1": [0.5, 0.7]}), ScoreTable("f1"))
    text = (
        "a\n<!-- experiment made-up -->\nold\n<!-- end -->\nb\n<!-- experiment made-up -->\n<!-- end -->\nc\n"
    )
    first, second = tables.fill(text), tables.fill(tables.fill(text))
    assert first == second
    assert "old" not in first
    assert re.fullmatch(r"a\n<!--.*-->\nb\n<!--.*-->\nc\n", first, re.S)
    assert first.count("kvtool eval qa qa.jsonl") == 1
    assert first.count("No results yet: ") == 2


def test_a_cell_is_a_mean_with_its_standard_error_and_the_papers_number(measured):
    rng = np.random.default_rng(0)
    full, h2o = rng.random(30), rng.random(30)
    text = measured(
        lines(full={"f1": full.tolist()}, h2o__64={"f1": h2o.tolist()}, h2o__128={"f1": full.tolist()}),
        ScoreTable("f1", paper={("h2o", "64"): "12.3", ("tova", "64"): "4.5"}),
    )
    error = 100 * full.std(ddof=1) / np.sqrt(30)
    all_kept = f"{100 * full.mean():.1f} ±{error:.1f}"
    evicted = f"{100 * h2o.mean():.1f} ±{100 * h2o.std(ddof=1) / np.sqrt(30):.1f}"
    assert f"| policy | 64 | 128 |\n| --- | ---: | ---: |\n| `full` | {all_kept} | {all_kept} |\n" in text
    assert f"| `h2o` | {evicted} (12.3) | {all_kept} |\n| `tova` | (4.5) |  |\n" in text
    assert text.startswith("    kvtool eval")
    assert "F1, % (in brackets: the paper's, with Llama):" in text
    assert "*30 items.*" in text


def test_differences_are_paired_and_named_where_a_table_s_tests_tell_them(measured):
    noise = np.random.default_rng(0).normal(size=40)
    spread = np.tile([1, -1], 20)
    # with 40 items of +-1 the mean's standard error is 0.16. Holm's first of three tests needs p <= 0.05 / 3:
    # a mean of at least 2.4 standard errors
    error = spread.std(ddof=1) / np.sqrt(40)
    text = measured(
        lines(
            buzz__64={"logp": noise.tolist()},
            h2o__64={"logp": (noise + spread + 3 * error).tolist()},
            tova__64={"logp": (noise + spread - 3 * error).tolist()},
            local__64={"logp": (noise + spread + 2.1 * error).tolist()},
        ),
        ScoreTable("logp", against="buzz"),
    )
    ends = dict(re.findall(r"\| `(\w+)` \| .*?±[\d.]+ ?(\w*) \|", text))
    # Holm tests local last, at p <= 0.05, because the two tests before it are significant
    assert ends == {"buzz": "", "h2o": "better", "tova": "worse", "local": "better"}
    alone = np.tile([1.0, -1.0], 20) + 2.1 * error
    many = {f"h2o:decay=0.{i}__64": {"logp": (noise + alone).tolist()} for i in range(1, 9)}
    text = measured(lines(buzz__64={"logp": noise.tolist()}, **many), ScoreTable("logp", against="buzz"))
    assert "better" not in text


def test_of_perplexities_lower_is_better_and_errors_are_of_blocks(measured):
    rng = np.random.default_rng(0)
    counts = statistics.block_counts(1000)
    means = rng.normal(3, 0.2, len(counts))
    of_blocks = {
        "of": "t.txt",
        "budget": "64",
        "tokens": 1001,
        "weights": {"nll": counts.tolist()},
        "seconds": 0,
        **VERSIONS,
    }
    stored = [
        {**of_blocks, "label": "buzz", "scores": {"nll": means.tolist()}},
        {**of_blocks, "label": "h2o", "scores": {"nll": (means + 0.1).tolist()}},
    ]
    text = measured(stored, ScoreTable("nll", against="buzz"))
    nll, error = statistics.mean_error(*joined(means * counts, counts))
    assert f"| `buzz` | {np.exp(nll):.2f} ±{np.exp(nll) * error:.2f} |" in text
    assert f"| `h2o` | {np.exp(nll + 0.1):.2f} ±{np.exp(nll + 0.1) * error:.2f} worse |" in text
    assert "*1,001 tokens" in text


def test_the_papers_differences_are_counted():
    better, same = [0.9, 0.8] * 5, [0.1, 0.8, 0.9, 0.0] * 2 + [0.5, 0.4]
    buzz = [0.5, 0.4] * 5
    stored = lines(
        full={"f1": better},
        buzz__64={"f1": buzz},
        h2o__64={"f1": better},
        tova__64={"f1": better},
        local__64={"f1": same},
        cam__64={"f1": better},
    )
    paper = {"full": "9", "buzz": "5", "h2o": "6", "tova": "4", "local": "3", "cam": "5", "roco": "1"}
    numbers = {(row, "64"): n for row, n in paper.items()}
    table = ScoreTable("f1", against="buzz", paper=numbers)
    # h2o differs as in the paper, tova in the other direction, local not significantly. The count leaves out
    # full, cam (equal to buzz in the paper) and roco (not measured)
    assert counted(stored, table) == Verdict(same=1, other=1, unclear=1)
    lower = [line | {"scores": {"ms": line["scores"]["f1"]}} for line in stored]
    slower = ScoreTable("ms", against="buzz", paper={("buzz", "64"): "5", ("h2o", "64"): "6"})
    assert counted(lower, slower) == Verdict(same=1)
    # if each policy has only one number, their difference cannot be tested
    single = [line | {"scores": {"f1": line["scores"]["f1"][:1]}, "items": ["a"]} for line in stored]
    assert counted(single, table) == Verdict(untested=3)


def test_too_few_that_differ_for_so_many_tests_are_no_test():
    # seven answers differ, so p is at least 2 / 2^7: below 0.05 for a single test, above 0.05 / 4 for four
    buzz, other = [0.5] * 9, [0.4] * 7 + [0.5] * 2
    stored = lines(buzz__64={"f1": buzz}, **{f"{name}__64": {"f1": other} for name in ("h2o", "tova", "cam")})
    rows = ("buzz", "h2o", "tova", "cam")
    assert counted(stored, ScoreTable("f1", against="buzz", rows=rows[:2], worse=rows[1:])) == Verdict(same=1)
    more = [*stored, *lines(local__64={"f1": [0.6, 0.4] * 4 + [0.5]})]
    assert counted(more, ScoreTable("f1", against="buzz", worse=rows[1:])) == Verdict(untested=3)
    # if only five answers differ, p is at least 2 / 2^5, above 0.05: there is no test at all
    five = lines(buzz__64={"f1": buzz}, h2o__64={"f1": [0.4] * 5 + [0.5] * 4})
    assert counted(five, ScoreTable("f1", against="buzz", worse=("h2o",))) == Verdict(untested=1)


def test_the_rows_of_a_column_have_the_same_items(measured):
    stored = lines(
        full={"f1": [0.1, 0.2]}, h2o__64={"f1": [0.3, 0.4, 0.9]}, h2o__128={"f1": [0.5, 0.6, None]}
    )
    text = measured(stored, ScoreTable("f1"))
    assert "| `full` | 15.0 ±5.0 | 15.0 ±5.0 |\n| `h2o` | 35.0 ±5.0 | 55.0 ±5.0 |" in text


def test_columns_of_shares_stand_in_order(measured):
    stored = lines(full={"f1": [0.1, 0.2]})
    for share in ("50 % removed", "8 % removed", "87.5 % removed"):
        stored += [line | {"budget": share} for line in lines(h2o__1={"f1": [0.3, 0.4]})]
    text = measured(stored, ScoreTable("f1"))
    assert "| policy | 8 % removed | 50 % removed | 87.5 % removed |" in text


def test_every_experiment_can_be_shown_once_something_is_measured(tmp_path):
    for name, run in RUNS.items():
        named = getattr(run, "named", "")
        labels = [named] if named else getattr(run, "policies", ()) or ("a", "b")
        for number, label in enumerate(labels):
            line = {
                **{"label": label, "budget": "64", "of": "qasper", "part": "p", "task": "qa", "tokens": 9},
                **{"bytes": [2**20, 0], "items": ["f-1", "f-2"], "seconds": 1, **VERSIONS},
                "scores": {score: [0.1 * number, 0.2] for score in (*SCORES, "rouge1", "rouge2", "rougeL")},
            }
            if isinstance(run, CompareRun):
                del line["items"]
            records.append(tmp_path / f"{name}.jsonl", line)
    for name in EXPERIMENTS:
        text = tables.render(name, tmp_path)
        assert "No results yet: " not in text
        assert text.endswith(".*")
    n_experiment = sum(map(len, index.PAPERS.values()))
    assert len(list(index.rows(tmp_path))) == n_experiment + 2


def test_what_the_paper_says_without_numbers_is_told_as_well():
    better, same, buzz = [0.9, 0.8] * 5, [0.1, 0.8, 0.9, 0.0] * 2 + [0.5, 0.4], [0.5, 0.4] * 5
    stored = lines(buzz__64={"f1": buzz}, h2o__64={"f1": better}, local__64={"f1": same}, full={"f1": better})
    for worse, verdict in (("h2o", Verdict(other=1)), ("local", Verdict(unclear=1))):
        assert counted(stored, ScoreTable("f1", against="buzz", worse=(worse,))) == verdict
    assert counted(stored, ScoreTable("f1", against="h2o", worse=("buzz", "local", "full"))) == Verdict(
        2, untested=1
    )
    # a policy that was not measured does not count
    assert counted(stored, ScoreTable("f1", against="buzz", worse=("tova",))).n == 0
    assert counted(stored, ScoreTable("f1", against="cam", worse=("h2o",))).n == 0


def test_the_geometric_means_error_is_that_of_draws():
    rng = np.random.default_rng(0)
    scores = {
        name: rng.gamma(3, size, 400) for name, size in (("rouge1", 0.1), ("rouge2", 0.02), ("rougeL", 0.08))
    }
    linear = places._rouge({name: values.tolist() for name, values in scores.items()})
    drawn = rng.integers(400, size=(4000, 400))
    geometric = np.prod([values[drawn].mean(axis=1) for values in scores.values()], axis=0) ** (1 / 3)
    mean, error = statistics.mean_error(np.array(linear), np.ones(400))
    assert mean == pytest.approx(np.prod([values.mean() for values in scores.values()]) ** (1 / 3))
    assert error == pytest.approx(geometric.std(), rel=0.05)
    # an item without scores does not count
    assert places._rouge({"rouge1": [0.5, None], "rouge2": [0.5, None], "rougeL": [0.5, None]}) == [0.5, None]
    # if one score's mean is 0, so is the geometric mean; it has no standard error, which needs two numbers
    assert places._rouge({"rouge1": [0.5, 0.5], "rouge2": [0, 0], "rougeL": [0.5, 0.5]}) == [0, None]


def test_a_pooled_column_has_the_items_of_all(measured):
    stored = lines(h2o__64={"f1": [0.0, 0.2]})
    other = [line | {"of": "other", "scores": {"f1": [0.4, 1.0]}} for line in stored]
    text = measured(stored + other, ScoreTable("f1", ("of",), names={"file": "first"}, pooled={"all": None}))
    assert "| policy | first | other | all |" in text
    assert "| `h2o` | 10.0 ±10.0 | 70.0 ±30.0 | 40.0 ±" in text


def test_rows_and_budgets_are_those_asked_for(measured):
    stored = lines(
        full={"f1": [1, 0]}, h2o__64={"f1": [1, 0]}, h2o__128={"f1": [0, 0]}, tova__64={"f1": [0, 1]}
    )
    text = measured(stored, ScoreTable("f1", rows=("full", "tova")))
    assert "| policy | 64 |\n| --- | ---: |\n| `full` | 50.0 ±50.0 |\n| `tova` | 50.0 ±50.0 |\n" in text
    text = measured(stored, ScoreTable("f1", rows=("h2o", "full"), budgets=("128",)))
    assert re.findall(r"^\| .*", text, re.M) == [
        "| policy | 128 |",
        "| --- | ---: |",
        "| `h2o` | 0.0 |",
        "| `full` | 50.0 ±50.0 |",
    ]


def test_data_sets_are_those_asked_for(measured):
    stored = [
        {**line, "of": of, "items": [f"{of}-{item}" for item in line["items"]]}
        for of, right in (("qasper", 1), ("trec", 0))
        for line in lines(full={"f1": [right, 1]}, h2o__64={"f1": [right, 0]})
    ]
    # lines of older versions lack this score
    del stored[0]["scores"]["f1"]
    text = measured(stored, ScoreTable("f1", by=("of",), of=("qasper",), pooled={"all": None}))
    assert "| policy | qasper | all |\n| --- | ---: | ---: |\n| `h2o` | 50.0 ±50.0 | 50.0 ±50.0 |\n" in text
    assert "*2 items.*" in text
    assert "*4 items.*" in measured(stored, ScoreTable("f1", by=("of",)))


def test_budgets_stand_in_their_order_and_texts_are_counted_by_length(measured):
    stored = [
        {**line, "tokens": tokens, "of": of}
        for tokens, of in ((9, "a"), (9, "b"), (5, "a"))
        for line in lines(h2o__30={"f1": [1]}, h2o__128={"f1": [1]}, h2o__5={"f1": [1]}, full={"f1": [0]})
    ]
    text = measured(stored, ScoreTable("f1"))
    assert "| policy | 5 | 30 | 128 |" in text
    assert "5 to 9 tokens of up to 2 texts.*" in text
    assert "9 tokens of each of 2 texts.*" in measured(stored[:8], ScoreTable("f1"))


def test_what_was_never_run_says_so(tmp_path):
    for name, each in EXPERIMENTS.items():
        text = tables.render(name, tmp_path)
        assert text.endswith(tables._NO_RESULTS)
        assert ("    # " in text or "    kvtool" in text) == each.commands
        assert "| --- |" not in text


def of_texts(n, more):
    """Yield lines of BUZZ and H2O for n texts. H2O's nll in text i is higher by more[i], plus noise."""
    rng = np.random.default_rng(0)
    counts = statistics.block_counts(1000)
    for i in range(n):
        level, noise = rng.normal(3, 0.5), rng.normal(0, 0.02, len(counts))
        about = {"of": f"t{i}.txt", "budget": "64", "tokens": 1001, "seconds": 0, **VERSIONS}
        about["weights"] = {"nll": counts.tolist()}
        for label, nll in (("buzz", level + 0 * noise), ("h2o", level + more[i] + noise)):
            yield about | {"label": label, "scores": {"nll": nll.tolist()}}


def test_of_several_texts_a_text_is_the_unit(measured):
    more = [0.1, 0.1, 0.1, 0.1, 0.1, -0.5]
    names = {f"t{i}.txt": "books" if i < 4 else "papers" for i in range(6)}
    table = ScoreTable("nll", ("of", "budget"), "buzz", names=names, pooled={"all": None})
    text = measured(list(of_texts(6, more)), table)
    assert "| policy | books, 64 | papers, 64 | all, 64 |" in text
    # the units are texts. Four books or two papers are too few for a test. All six texts have no verdict
    # either, because H2O is worse in five texts and better in one. If blocks were units, the books would have
    # a verdict
    assert "better" not in text
    assert "worse" not in text
    text = measured(list(of_texts(6, [0.1] * 6)), table)
    assert re.findall(r"worse \|$", text, re.M) == ["worse |"]
    level = [np.average(line["scores"]["nll"]) for line in of_texts(6, more) if line["label"] == "buzz"]
    error = np.exp(np.mean(level)) * np.std(level, ddof=1) / np.sqrt(6)
    assert f"{np.exp(np.mean(level)):.2f} ±{error:.2f} |" in text


def test_what_is_above_the_full_cache_is_told_text_by_text(measured):
    more = np.array([0.05, 0.06, 0.07, 0.05, 0.06, 0.07])
    # nll differs far more between texts than between policies. The table must show the error of the
    # differences in nll, not of nll
    stored = [
        line | {"label": "full", "budget": None} if line["label"] == "buzz" else line
        for line in of_texts(6, more)
    ]
    means = [
        np.average(np.subtract(line["scores"]["nll"], full["scores"]["nll"]), weights=line["weights"]["nll"])
        for full, line in zip(stored[::2], stored[1::2], strict=True)
    ]
    above, error = np.expm1(np.mean(means)), np.exp(np.mean(means)) * np.std(means, ddof=1) / np.sqrt(6)
    text = measured(stored, ScoreTable("above", ("budget",), apart="full"))
    assert f"| `h2o` | {100 * above:.1f} ±{100 * error:.1f} |" in text
    assert "`full`" not in text


def test_only_tokens_behind_the_budget_count_if_asked(measured):
    about = {"of": "t.txt", "tokens": 1024, "weights": {"nll": [31] * 33}, "seconds": 0, **VERSIONS}
    nll = [9.0] * 10 + [3.0] + [1.0] * 22
    stored = [about | {"label": "corm", "budget": None, "scores": {"nll": nll}}]
    stored += [about | {"label": "h2o", "budget": n, "scores": {"nll": nll}} for n in ("300", "310", "311")]
    # ten blocks have 310 tokens. The eleventh block has a nll of 3: it is scored with a budget of 310, but
    # not with 311
    means = [np.exp(25 / 23), np.exp(25 / 23), np.e]
    text = re.sub(r" ±[\d.]+", "", measured(stored, ScoreTable("nll", late=True)))
    for label in ("corm", "h2o"):
        assert f"| `{label}` | {' | '.join(f'{mean:.2f}' for mean in means)} |" in text
    whole = re.sub(r" ±[\d.]+", "", measured(stored, ScoreTable("nll")))
    assert f"| `corm` | {np.exp(115 / 33):.2f} |" in whole


def test_rows_may_be_budgets_of_a_policy(measured):
    stored = lines(h2o__51={"ms": [2.0] * 8}, h2o__102={"ms": [1.0] * 8}, full={"ms": [3.0] * 8})
    table = ScoreTable(
        "ms", ("label",), "51", ("51", "102"), row="budget", theirs={("102", "h2o"): 1}, head="cells"
    )
    text = measured(stored, table)
    assert "| cells | h2o |\n| --- | ---: |\n| 51 | 2.00 |\n| 102 | 1.00 better |\n" in text
    # in the paper 102 cells take more time than 51 cells; here they take less
    assert counted(stored, table) == Verdict(other=1)


def test_a_mean_of_some_texts_bytes_is_not_shown(measured):
    stored = [
        line | {"of": of, "budget": budget, "bytes": [2**20, 0]}
        for of in ("a", "b")
        for budget in ("1", "2")
        for line in lines(h2o={"nll": [0.1]})
    ]
    assert "| policy | 1 | 2 |" in measured(stored, ScoreTable("device"))
    del stored[0]["bytes"]
    assert "| policy | 2 |\n| --- | ---: |\n| `h2o` | 1.0 |\n" in measured(stored, ScoreTable("device"))


def test_tokens_that_a_row_holds_are_those_not_evicted(measured):
    stored = [line | {"tokens": 2000} for line in lines(corm={"evicted": [0.75]}, full={"evicted": [0.0]})]
    text = measured(stored, ScoreTable("holds"))
    assert "| `corm` | 500 |\n| `full` | 2000 |" in text


def test_bytes_are_shown_in_mib_without_an_error(measured):
    stored = [
        line | {"bytes": [n * 2**20, 2**19]}
        for n, line in enumerate(lines(h2o__64={"nll": [0.1]}, buzz__64={"nll": [0.2]}), 3)
    ]
    text = measured(stored, ScoreTable("device"), ScoreTable("host"))
    assert re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M) == [
        *(("h2o", "3.0 | 0.5"), ("buzz", "4.0 | 0.5")),
    ]


def test_only_pooled_columns_are_shown_and_compared_if_asked(measured):
    stored = [
        line | {"of": f"of{i}"}
        for i in range(2)
        for line in lines(buzz__64={"f1": [0.5] * 10}, h2o__64={"f1": [0.4] * 10})
    ]
    table = {"by": ("of",), "against": "buzz", "pooled": {"all": None}, "worse": ("h2o",)}
    assert measured(stored, ScoreTable("f1", **table)).count("worse") == 3
    pooled = ScoreTable("f1", **table, only_pooled=True)
    text = measured(stored, pooled)
    assert text.count("worse") == 1
    assert "of0" not in text
    assert counted(stored, pooled) == Verdict(same=1)


def test_the_same_item_of_several_files_is_one_unit(measured):
    stored = [
        line | {"of": f"of{i}", "items": [f"of{i}-{item}" for item in range(1, 6)]}
        for i in range(3)
        for line in lines(buzz__64={"f1": [0.5] * 5}, h2o__64={"f1": [0.4] * 5})
    ]
    table = {"by": ("of",), "against": "buzz", "pooled": {"all": None}, "only_pooled": True}
    # with `same_item`, fifteen answers to five questions are five units, too few for a test
    assert "worse" in measured(stored, ScoreTable("f1", **table))
    assert "worse" not in measured(stored, ScoreTable("f1", **table, same_item=True))


def test_a_macro_average_is_of_categories_of_sets_of_items(measured):
    scores = {"a": [1.0, 0.0, 0.5, 0.5], "b": [0.8, 0.2], "c": [0.0, 0.2]}
    stored = [line | {"of": of} for of, values in scores.items() for line in lines(full={"f1": values})]
    strata = {"a": "questions", "b": "questions", "c": "code"}
    pooled = {"EN": frozenset("ac"), "all": None}
    text = measured(stored, ScoreTable("f1", ("of",), strata=strata, pooled=pooled))
    variances = {of: np.var(values, ddof=1) / len(values) for of, values in scores.items()}
    whole = np.sqrt(variances["a"] / 16 + variances["b"] / 16 + variances["c"] / 4)
    some = np.sqrt(variances["a"] / 4 + variances["c"] / 4)
    assert "| policy | a | b | c | EN | all |" in text
    assert "| `full` | 50.0 ±20.4 | " in text
    mean = 100 * (0.5 + 0.1) / 2
    assert f" | {mean:.1f} ±{100 * some:.1f} | {mean:.1f} ±{100 * whole:.1f} |" in text


def test_an_average_that_lacks_a_data_set_is_not_shown(measured):
    stored = [line | {"of": of} for of in "ac" for line in lines(full={"f1": [0.5, 0.7]})]
    pooled = {"EN": frozenset("ac"), "ZH": frozenset("bc")}
    text = measured(stored, ScoreTable("f1", ("of",), pooled=pooled))
    assert "| policy | a | c | EN |" in text
    assert "| 60.0 ±5.8 |\n" in text
    assert "ZH" not in text


def test_a_pooled_column_without_numbers_has_the_direction_of_the_others_mean():
    stored = [
        line | {"of": of}
        for of in ("x", "y")
        for line in lines(buzz__64={"f1": [0.5] * 10}, h2o__64={"f1": [0.4] * 10})
    ]
    paper = {("buzz", "x"): "10", ("h2o", "x"): "11", ("buzz", "y"): "10", ("h2o", "y"): "7"}
    table = ScoreTable("f1", ("of",), "buzz", pooled={"all": None}, only_pooled=True, paper=paper)
    assert counted(stored, table) == Verdict(same=1)
    paper = paper | {("h2o", "x"): "14"}
    table = ScoreTable("f1", ("of",), "buzz", pooled={"all": None}, only_pooled=True, paper=paper)
    assert counted(stored, table) == Verdict(other=1)


def test_rows_that_are_no_policies_have_a_heading_of_their_own(measured):
    stored = lines(here={"f1": [0.9] * 10}, chance={"f1": [0.1] * 10})
    table = ScoreTable("f1", against="chance", theirs={("here", "None"): 1}, head="where")
    text = measured(stored, table)
    assert "| where | None |\n| --- | ---: |\n| here | 90.0 better |\n| chance | 10.0 |" in text
    assert counted(stored, table) == Verdict(same=1)
