"""Task files: damaged files and unknown layouts are errors, and the layouts of tests/data are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvtool import tasks
from kvtool.errors import InputError, UsageError
from kvtool.tasks import data
from kvtool.tasks.longbench import PARTS

DATA = Path(__file__).parents[1] / "data"


def items(task, *files, **params):
    return tasks.load(task)(**params).items([DATA / file for file in files], None)


def test_json_lines_arrays_and_gzip_files_are_read(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"a": "x\u2028y"}\n\n{"a": 2}\n', encoding="utf-8")
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    array = tmp_path / "a.json"
    array.write_text('\ufeff [{"a": "x\u2028y"},\n{"a": 2}]', encoding="utf-8")
    for path in (lines, packed, array):
        assert data.read(path) == [{"a": "x\u2028y"}, {"a": 2}]
        assert data.stem(path) == "a"


def test_lone_surrogate_is_read_as_a_question_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"a": "\ud83d\ude00 \uD83D."}' + "\n")
    assert data.read(path) == [{"a": "\U0001f600 ?."}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": ', "line 2, column 7, is not JSON: Expecting value$"),
        ("a.jsonl", b'[{"a": 1},\n  x]', "line 2, column 3, is not JSON: Expecting value$"),
        ("a.jsonl", b'{"a":' * 100_000, "line 1, is not JSON"),
        ("a.jsonl", b"[" * 100_000, "is not JSON"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"caf\xe9", "not UTF-8"),
        ("a.jsonl.gz", b"no gzip", "not a complete gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}', mtime=0)[:-9], "not a complete gzip file"),
        ("a.jsonl", b'{"a": 1}\n', "record 1, has a layout that qa does not know .its fields are 'a'.; docs"),
        ("a.jsonl", b"{}", "record 1, has a layout that qa does not know .it has no fields.; docs"),
        ("a.jsonl", b"[1, 2]", "record 1, has a layout that qa does not know .it is not an object.; docs"),
        ("a.jsonl", b'{"question": "?", "answers": [], "ctxs": []}', "does not know .no answer.; docs"),
        ("a.jsonl", b'{"question": 3, "answers": ["x"], "ctxs": []}', "expected a text, got 3"),
    ],
)
def test_damaged_files_and_unknown_layouts_are_refused(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        items("qa", path)


def test_a_text_instead_of_a_list_is_one_right_answer(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "Which colour?", "answers": "green", "ctxs": []}')
    assert [item.references for item in items("qa", path)] == [["green"]]


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(InputError, match="cannot read"):
            items("qa", path)


def test_qa_prompts_equal_lost_in_the_middle():
    first, second = items("qa", "lost_in_the_middle.jsonl")
    assert first.id == "lost_in_the_middle-1"
    assert first.references == ["Ada Quill", "A. Quill"]
    assert first.prompt == (
        "Write a high-quality answer for the given question using only the provided search results (some of "
        "which might be irrelevant).\n\n"
        "Document [1](Title: Cape Marrow) The first lighthouse at Cape Marrow was built by Ada Quill in "
        "1841.\n"
        "Document [2](Title: Foghorn) A foghorn warns ships when the lamp cannot be seen.\n\n"
        "Question: who built the first lighthouse at cape marrow\nAnswer:"
    )
    assert second.references == ["212"]


def test_qa_reads_both_layouts_of_hotpotqa():
    first, second = items("qa", "hotpotqa.jsonl")
    assert (
        "Document [2](Title: Dunmere) Dunmere is a town on the Lisk.\n\nQuestion: Which river" in first.prompt
    )
    assert second.references == ["no"]
    first, _ = items("qa", "hotpotqa_published.json")
    assert "Document [1](Title: Port Hale) Port Hale has a ferry. It lands at Skerry.\n" in first.prompt


def test_qa_reads_longbench():
    first, _ = items("qa", "longbench.jsonl")
    assert (
        "The mill stood in {Arden}.\n\nPassage 2:\nMills grind.\n\nQuestion: Where was the mill?"
        in first.prompt
    )
    assert first.references == ["in Arden", "Arden"]


def test_qa_reads_locomo_and_omits_questions_without_answer():
    questions = items("qa", "locomo.json")
    assert [item.id for item in questions] == ["locomo-1-1", "locomo-1-2", "locomo-2"]
    assert [item.references for item in questions] == [["a pear tree"], ["2022"], ["Wren"]]
    assert (
        "Date: 2 pm on 3 May, 2022\nNell: I planted a pear tree.\nTom: In the yard?\n\n"
        "Date: 9 am on 1 June, 2022\nTom: How is the tree?\n\nQuestion: When was it planted?"
    ) in questions[1].prompt
    assert questions[1].about == {"file": "locomo.json", "category": 2}


def test_retrieval_prompts_equal_lost_in_the_middle():
    first, _ = items("retrieval", "kv_retrieval.jsonl")
    record = data.read(DATA / "kv_retrieval.jsonl")[0]
    assert first.references == [record["value"]]
    start, json_text = first.prompt.split("JSON data:\n")
    assert start == "Extract the value corresponding to the specified key in the JSON object below.\n\n"
    pairs, question = json_text.split("\n\n")
    assert list(json.loads(pairs).items()) == [tuple(pair) for pair in record["ordered_kv_records"]]
    assert question == f'Key: "{record["key"]}"\nCorresponding value:'


@pytest.mark.parametrize(("n", "places"), [(5, (2, 0)), (3, (1, 0)), (2, (0, 0)), (1, (0, 0))])
def test_retrieval_with_fewer_pairs_keeps_the_relative_place_of_the_key(n, places):
    records = data.read(DATA / "kv_retrieval.jsonl")
    questions = items("retrieval", "kv_retrieval.jsonl", pairs=n)
    for record, item, place in zip(records, questions, places, strict=True):
        pairs = list(json.loads(item.prompt.split("JSON data:\n")[1].split("\n\n")[0]).items())
        assert len(pairs) == n
        assert pairs[place] == (record["key"], record["value"])
        others = [tuple(pair) for pair in record["ordered_kv_records"] if pair[0] != record["key"]]
        assert pairs[:place] + pairs[place + 1 :] == others[: len(pairs) - 1]


def test_retrieval_refuses_more_pairs_than_a_record_has():
    with pytest.raises(InputError, match="^pairs must be at most 5, the number in a record, got 9$"):
        items("retrieval", "kv_retrieval.jsonl", pairs=9)


def test_xsum_keeps_its_instruction_and_cnn_dailymail_gets_one():
    first, *_ = items("summarize", "xsum.jsonl")
    assert first.prompt == (
        "###\nArticle: The council of Dunmere voted to mend the old bridge. Work starts in spring.\n\n"
        "Summarize the above article in 1 sentence.\n"
    )
    assert first.references == ["Dunmere's bridge will be mended in spring."]
    first, _ = items("summarize", "cnn_dailymail.jsonl")
    assert first.prompt.endswith("A tenth came in May.\n\nSummarize the above article in 3 sentences.\n")
    one, other = items("summarize", "articles_published.jsonl", sentences=1)
    assert one.prompt.startswith("###\nArticle: The baker rose at three.")
    assert one.prompt.endswith("\n\nSummarize the above article in 1 sentence.\n")
    assert (one.references, other.references) == (["The bread was sold by six."], ["The clock stopped ."])


def test_summary_shots_are_other_articles_chosen_by_the_seed():
    articles = items("summarize", "xsum.jsonl", shots=2)
    for i, item in enumerate(articles):
        assert item.prompt.count("###\nArticle: ") == 3
        others = [other for other in articles if other is not item]
        for other in others:
            assert item.prompt.count(other.references[0]) == 1
        assert item.references[0] not in item.prompt
        assert item.prompt.endswith("in 1 sentence.\n")
        # a shot is an article with its summary; an empty line follows
        assert f"in 1 sentence.\n{others[0].references[0]}\n\n###" in item.prompt
        assert item == items("summarize", "xsum.jsonl", shots=2)[i]
    orders = {tuple(i.prompt for i in items("summarize", "xsum.jsonl", shots=2, seed=s)) for s in range(5)}
    assert len(orders) > 1
    with pytest.raises(InputError, match="there are 2"):
        items("summarize", "xsum.jsonl", shots=3)


def test_qmsum_has_the_relevant_spans_or_the_whole_meeting():
    spans = items("summarize", "qmsum.jsonl")
    assert [item.references[0] for item in spans] == [
        "It leaks.",
        "They cost nine pounds and will be bought.",
        "Dig.",
    ]
    assert "Transcript:\nAnn: The roof leaks.\n\nNow" in spans[0].prompt
    assert "\nChair: Let us begin.\nBob: Tiles cost nine pounds.\nChair: We buy tiles.\n\n" in spans[1].prompt
    whole = items("summarize", "qmsum.jsonl", spans=False)
    assert len(whole) == 4
    assert whole[0].references == ["Tiles will be bought for the roof."]
    assert all("Chair: Let us begin.\nAnn: The roof leaks.\nBob" in item.prompt for item in whole[:3])


@pytest.mark.parametrize(
    ("file", "prompt", "choices", "right"),
    [
        ("openbookqa", "A frog lives in", ["a pond", "a lamp", "a clock", "a drum"], 0),
        (
            "piqa",
            "Question: How to keep bread fresh?\nAnswer:",
            ["Wrap it in a cloth.", "Put it into a pond."],
            0,
        ),
        ("winogrande", "The pot did not fit into the bag because the", ["pot", "bag"], 1),
        (
            "mathqa",
            "Question: a crate holds 12 jars . how many jars do 5 crates hold ?\nAnswer:",
            ["17", "60", "1,200", "50", "none of these"],
            1,
        ),
        ("copa", "The candle went out because", ["the book was long.", "the window was open."], 1),
        (
            "rte",
            "The mill was sold to Ada Quill in May.\nQuestion: Ada Quill bought the mill. True or False?\n"
            "Answer:",
            ["True", "False"],
            0,
        ),
    ],
)
def test_choice_prompts_equal_lm_evaluation_harness(file, prompt, choices, right):
    first, second = items("choice", f"{file}.jsonl")
    assert (first.prompt, first.choices, first.references) == (prompt, choices, [choices[right]])
    assert first.about.get("ending") == (" was too small." if file == "winogrande" else None)
    assert second.references[0] in second.choices


def test_options_of_mathqa_may_be_a_list(tmp_path):
    path = tmp_path / "a.jsonl"
    listed = "x ? The options: ['A ) 2 : 3', 'B ) 4 , 5']"
    path.write_text(json.dumps({"instruction": listed, "answer": "B"}) + "\n")
    (item,) = items("choice", path)
    assert item.choices == ["2 : 3", "4 , 5"]
    assert item.references == ["4 , 5"]


def test_copa_effect_question_ends_with_therefore():
    assert items("choice", "copa.jsonl")[1].prompt == "The rope broke therefore"


def test_choice_shots_are_solved_examples():
    first, second = items("choice", "winogrande.jsonl", shots=1)
    assert first.prompt == (
        "Ann thanked Eve. Ann had been helped.\n\nThe pot did not fit into the bag because the"
    )
    assert second.prompt == (
        "The pot did not fit into the bag because the bag was too small.\n\nAnn thanked Eve."
    )
    first, _ = items("choice", "rte.jsonl", shots=2, train=str(DATA / "piqa.jsonl"))
    assert "Question: open a jar\nAnswer: turn the lid\n\n" in first.prompt
    with pytest.raises(InputError, match="there are 1"):
        items("choice", "rte.jsonl", shots=2)
    with pytest.raises(UsageError, match=r"0\.\.5"):
        tasks.make("choice", ["shots=6"])


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "What?", "answer": "answer1"},
        {"instruction": "Please choose the correct answer to the question: x", "answer": "answer1"},
        {"p": "It.", "a1": "A.", "a2": "B.", "asks-for": "cause", "most-plausible-alternative": "3"},
        {"p": "It.", "a1": "A.", "a2": "B.", "asks-for": "cause", "most-plausible-alternative": "0"},
        {"sentence1": "x", "sentence2": "y", "label": 2},
        {"sentence1": "x", "sentence2": "y", "label": -1},
        {"instruction": "x The options: A ) 1 , B ) 2", "answer": "E"},
        {"instruction": "x The options: ['A ) 1', ", "answer": "A"},
    ],
)
def test_a_choice_without_a_right_answer_is_refused(tmp_path, record):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(InputError, match="record 1, has a layout that choice does not know"):
        items("choice", path)


def test_longbench_has_21_tasks_and_their_prompts():
    assert len(PARTS) == 21
    first, second = items("longbench", "longbench.jsonl")
    assert first.prompt == (
        "Answer the question based on the given passages. Only give me the answer and do not output any "
        "other words.\n\nThe following are given passages.\nPassage 1:\nThe mill stood in {Arden}.\n\n"
        "Passage 2:\nMills grind.\n\nAnswer the question based on the given passages. Only "
        "give me the answer and do not output any other words.\n\nQuestion: Where was the mill?\nAnswer:"
    )
    # the dataset names of LongBench-E end in _e. This ending is dropped
    assert second.about == {"dataset": "trec"}
    assert second.prompt.endswith("Type: Definition\nQuestion: What is a heron ?\nType:")
    assert second.choices == ["Individual", "Definition", "Date"]
    first, second = items("longbench", "longbench_prompts.jsonl")
    assert first.prompt.startswith("以下是两段。")
    assert [item.about["dataset"] for item in (first, second)] == ["passage_retrieval_zh", "lcc"]
    assert items("longbench", "longbench_prompts.jsonl", only=("lcc",)) == [second]


def test_longbench_tasks_have_the_published_lengths_and_metrics():
    lengths = {
        32: "hotpotqa 2wikimqa musique triviaqa passage_count passage_retrieval_en passage_retrieval_zh",
        64: "multifieldqa_en multifieldqa_zh trec lsht lcc repobench-p",
        128: "narrativeqa qasper dureader samsum",
        512: "gov_report qmsum multi_news vcsum",
    }
    scored = {
        "f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa",
        "f1_zh": "multifieldqa_zh",
        "rouge_l": "gov_report qmsum multi_news samsum",
        "rouge_l_zh": "dureader vcsum",
        "classification": "trec lsht",
        "share_of_numbers": "passage_count",
        "retrieval": "passage_retrieval_en passage_retrieval_zh",
        "code_similarity": "lcc repobench-p",
    }
    without_input = ["gov_report", "multi_news", "vcsum", "passage_count"]
    for name, part in PARTS.items():
        assert name in lengths[part.n_max].split()
        assert name in scored[part.metric.__name__].split()
        prompt = part.prompt.format(context="CONTEXT", input="INPUT")
        assert prompt.count("CONTEXT") == 1
        assert prompt.count("INPUT") == (name not in without_input)
        assert part.as_it_is == (name in ["trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"])
        assert part.first_line == (name in ["trec", "triviaqa", "samsum", "lsht"])
    assert PARTS["lcc"].prompt.endswith("Next line of code:\n")


def test_unknown_longbench_tasks_and_missing_classes_are_refused(tmp_path):
    with pytest.raises(UsageError, match="narrativeqa"):
        tasks.make("longbench", ["only=nope"])
    with pytest.raises(InputError, match="no records of vcsum"):
        items("longbench", "longbench.jsonl", only=("vcsum",))
    path = tmp_path / "a.jsonl"
    path.write_text('{"task": "trec", "prompt": "x", "answers": ["y"], "all_classes": null}\n')
    with pytest.raises(InputError, match="all_classes"):
        items("longbench", path)


def test_stream_turns_do_not_depend_on_the_order_of_files():
    turns = items("stream", "mt_bench_answer.jsonl", "mt_bench_question.jsonl")
    assert [(item.prompt, item.references) for item in turns] == [
        ("Name three birds.", []),
        ("Now name three fish.", []),
        ("What is 2 and 3?", ["It is 5."]),
        ("And twice that?", ["It is 10."]),
    ]
    assert [item.about["number"] for item in turns] == [0, 1, 2, 3]
    assert turns[3].about["chat_id"] == 101
    scored = items("stream", "mt_bench_question.jsonl", "mt_bench_answer.jsonl", scored=True)
    assert [item.about["number"] for item in scored] == [0, 1]


def test_a_stream_reads_chats_of_two_layouts():
    turns = items("stream", "conversations.json")
    assert [(item.prompt, item.references) for item in turns] == [
        ("Who keeps the lamp?", ["The keeper does."]),
        ("Thank you.", []),
        ("Is it lit?", ["It is."]),
    ]
    turns = items("stream", "messages.jsonl")
    assert [(item.id, item.references) for item in turns] == [
        ("messages-1-1", ["A wet meadow."]),
        ("messages-2-1", ["A small lake."]),
    ]
    with pytest.raises(InputError, match="no turns"):
        items("stream", "mt_bench_answer.jsonl")
    for scored in (False, True):
        with pytest.raises(InputError, match="no turn in .* has a right answer, so nothing would be scored"):
            items("stream", "mt_bench_question.jsonl", scored=scored)


@pytest.mark.parametrize(
    ("task", "setting", "words"),
    [("qa", "n_max=0", "n_max"), ("summarize", "shots=-1", "shots"), ("stream", "n_max=0", "n_max")],
)
def test_parameters_out_of_range_are_refused(task, setting, words):
    with pytest.raises(UsageError, match=words):
        tasks.make(task, [setting])
