"""RULER's thirteen tasks: what each asks, how long it is, how it is scored, and when its question is read."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from kvtool import policies, tasks
from kvtool.chats.template import Template
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import InputError, UsageError
from kvtool.llama.loaded.model import Model
from kvtool.measure import records
from kvtool.tasks import results as of_items
from kvtool.tasks._ruler import sources
from kvtool.tasks._ruler.subtask import largest
from kvtool.tasks.haystack import FILLER
from kvtool.tasks.reader import Reader
from kvtool.tasks.ruler import PARTS, string_match
from kvtool.tasks.task import Item
from tests import tiny
from tests.cli.in_process_command import run_kvtool

DATA = Path(__file__).parents[1] / "data"

NIAH = {
    # (number of keys, number of values, number of values in the answer, kind of keys, kind of values). If the
    # numbers are None, every line is a needle
    "niah_single_1": (1, 1, 1, "word", "number"),
    "niah_single_2": (1, 1, 1, "word", "number"),
    "niah_single_3": (1, 1, 1, "word", "uuid"),
    "niah_multikey_1": (4, 4, 1, "word", "number"),
    "niah_multikey_2": (None, None, 1, "word", "number"),
    "niah_multikey_3": (None, None, 1, "uuid", "uuid"),
    "niah_multivalue": (1, 4, 4, "word", "number"),
    "niah_multiquery": (4, 4, 4, "word", "number"),
}

NEEDLE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")

ESSAYS = {
    "b.txt": "Writing is hard. Is it? Most of it is; the rest is rewriting!\n\n",
    "a.txt": "A town had a mill.\nIt stood by the river. " * 30,
}


@pytest.fixture
def listed(monkeypatch):
    """Replace the words of wonderwords with made-up words."""
    words = {kind: [f"{kind}{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(600)] for kind in KINDS}
    monkeypatch.setattr(sources, "_words", words.get)


KINDS = ("noun", "adjective", "verb")


@pytest.fixture(scope="module")
def model(smol_whole):
    with closing(Model(smol_whole)) as model:
        yield model


@pytest.fixture
def parameters(tmp_path):
    """Return the task's parameters that name files."""
    (tmp_path / "essays").mkdir()
    for name, text in ESSAYS.items():
        (tmp_path / "essays" / name).write_text(text)
    files = {
        "essays": tmp_path / "essays",
        "squad": DATA / "squad.json",
        "hotpotqa": DATA / "hotpotqa_published.json",
    }
    return [f"{name}={path}" for name, path in files.items()]


@pytest.fixture
def items_of(model, parameters, listed):
    """make(name, *parameters) returns the items of one of RULER's tasks."""

    def make(name, *more, length=1200, repeats=1):
        task = tasks.make(
            "ruler", [*parameters, f"tasks={name}", f"lengths={length}", f"repeats={repeats}", *more]
        )
        return task.items([], model)

    return make


def n_token(model, item):
    return len(model.tokenize(f"{item.prompt} {item.opening}", start=True))


@pytest.mark.parametrize("name", PARTS)
def test_sample_fills_its_length_and_depends_only_on_the_seed(name, items_of, model):
    length = 4096 if name == "cwe" else 1200
    items = items_of(name, length=length, repeats=2)
    assert [item.id for item in items] == [f"{name}-{length}-{i}" for i in range(2)]
    assert items == items_of(name, length=length, repeats=2)
    assert items[0].prompt != items[1].prompt
    # seeds shuffle the documents; a prompt has so few of them that two seeds may give the same order
    other_prompts = (items_of(name, f"seed={seed}", length=length)[0].prompt for seed in (1, 2, 3))
    assert any(other != items[0].prompt for other in other_prompts)
    for item in items:
        assert item.prompt.endswith(item.question)
        assert item.references
        room = length - PARTS[name].n_max - n_token(model, item)
        assert room >= 0
        # another line, sentence or word would not fit (cwe lists each word 3 times). The tasks of qa may
        # leave more room, because they have too few documents to fill it
        assert room < 100 or name.startswith("qa")


@pytest.mark.parametrize("name", NIAH)
def test_prompt_hides_the_defined_number_of_needles(name, items_of):
    n_key, n_value, n_reference, key_kind, value_kind = NIAH[name]
    (item,) = items_of(name)
    needles = NEEDLE.findall(item.prompt)
    values = {key: [value for _, other, value in needles if other == key] for _, key, _ in needles}
    if n_key:
        assert len(values) == n_key
        assert len(needles) == n_value
    else:
        # every line is a needle
        assert len(values) == len(needles) == item.prompt.count("\n") - 1 > 5
    assert {kind for kind, _, _ in needles} == {f"{value_kind}s"}
    keys = [key for key in values if re.search(rf"\b{key}\b", item.question)]
    assert sorted(item.references) == sorted(value for key in keys for value in values[key])
    assert len(item.references) == n_reference
    for value in item.references:
        assert re.fullmatch(r"\d{7}", value) if value_kind == "number" else UUID(value).version == 4
    for key in keys:
        assert re.fullmatch("adjective..-noun..", key) if key_kind == "word" else UUID(key).version == 4


def test_needles_are_hidden_in_noise_or_essays(items_of):
    def around(name):
        (item,) = items_of(name)
        text = item.prompt.removesuffix(item.question).split("\n", 1)[1].removesuffix("\n")
        # removing a needle leaves two blanks or two line ends in a row. Replace them by a single blank or
        # line end
        return NEEDLE.sub("", text).replace("  ", " ").replace("\n\n", "\n").strip()

    assert set(around("niah_single_1").split("\n")) == {FILLER}
    # the essays follow in the order of their files' names
    whole = " ".join("".join(ESSAYS[name] for name in sorted(ESSAYS)).split())
    whole = f"{whole} {whole}"
    for name in ("niah_single_2", "niah_multikey_1", "niah_multivalue", "niah_multiquery"):
        text = around(name)
        assert len(text) > len(whole) / 2
        assert whole.startswith(text) or text.startswith(whole)


def test_question_is_singular_for_one_value_and_plural_for_several(items_of):
    (item,) = items_of("niah_single_3")
    start = (
        "A special magic uuid is hidden within the following text. Make sure to memorize it. I will quiz you"
    )
    assert item.prompt.startswith(f"{start} about the uuid afterwards.\n")
    ((_, key, _),) = NEEDLE.findall(item.prompt)
    assert item.question == f"What is the special magic uuid for {key} mentioned in the provided text?"
    assert item.opening == f"The special magic uuid for {key} mentioned in the provided text is"
    (item,) = items_of("niah_multiquery")
    start = (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will"
    )
    assert item.prompt.startswith(f"{start} quiz you about the numbers afterwards.\n")
    values = {value: key for _, key, value in NEEDLE.findall(item.prompt)}
    a, b, c, d = (values[value] for value in item.references)
    numbers = f"the special magic numbers for {a}, {b}, {c}, and {d} mentioned in the provided text"
    assert item.question == f"What are all {numbers}?"
    assert item.opening == f"T{numbers[1:]} are"


def test_variable_chain_follows_a_solved_example(items_of, model):
    (item,) = items_of("vt", length=2000)
    start = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    empty, solved, unsolved = item.prompt.split(start)
    assert not empty
    assert len(model.tokenize(f"{start}{solved}", start=True)) <= 501
    sizes = []
    for text, n_letter in ((solved, 3), (f"{unsolved} {item.opening}", 5)):
        question = re.search(
            r"\nQuestion: Find all variables that are assigned the value (\d{5}) in the text above\. "
            r"Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are "
            r"assigned the value (\d{5}), they are: ",
            text,
        )
        lines = text[: question.start()].split("\n")
        assignments = [line for line in lines if line.startswith("VAR ")]
        assert {line for line in lines if line not in assignments} == {FILLER}
        first, *others = (line.split() for line in assignments)
        assert first[3] == question[1] == question[2]
        chain = [first[1]]
        for _, name, _, _, before in others:
            assert before == chain[-1]
            chain.append(name)
        assert len(set(chain)) == 5
        assert {len(name) for name in chain} == {n_letter}
        if n_letter == 3:
            assert text[question.end() :].split() == chain
        else:
            assert list(item.references) == chain
        sizes.append(len(lines))
    assert 10 <= sizes[0] < sizes[1]


@pytest.mark.parametrize(
    ("length", "often", "solved_often"), [(1200, {6, 1}, {3, 1}), (4096, {30, 3}, {10, 3})]
)
def test_answers_of_cwe_are_the_ten_most_common_words(length, often, solved_often, items_of):
    (item,) = items_of("cwe", length=length)
    question = "Question: What are the 10 most common words in the above list?"
    assert item.question == question
    opening = "Answer: The top 10 words that appear most often in the list are:"
    assert item.opening == opening
    solved, unsolved = item.prompt.removesuffix(question).split(f"\n{question} {opening} ")
    right, _, unsolved = unsolved.partition("\n")
    for text, answers, counts in (
        (solved, re.findall(r"\d+\. (\w+)", right), solved_often),
        (unsolved, list(item.references), often),
    ):
        intro, _, listed = text.strip().partition("\n")
        assert intro.startswith("Below is a numbered list of words.")
        numbers, words = zip(*(each.split(". ") for each in re.findall(r"\d+\. \w+", listed)), strict=True)
        assert list(map(int, numbers)) == list(range(1, len(words) + 1))
        of = Counter(words)
        assert set(of.values()) == counts
        assert sorted(answers) == sorted(word for word, n in of.items() if n == max(counts))
        assert len(answers) == 10
        # the words are shuffled
        assert list(words) != sorted(words, key=of.__getitem__, reverse=True)


def test_answers_of_fwe_are_the_three_most_frequent_coded_words(items_of):
    (item,) = items_of("fwe")
    words = re.findall(r"\.\.\.|\b[a-z]{6}\b", item.prompt.split("coded words. ")[1].split("\n")[0])
    of = Counter(words)
    (dots, n_dots), *ranked = of.most_common()
    assert dots == "..."
    assert [word for word, _ in ranked[:3]] == list(item.references)
    # how often each word occurs follows the zeta distribution with alpha 2, rounded down
    n_word = [n for n in range(10, 5000) if int(n * 6 / np.pi**2) == n_dots]
    counts = [n_dots, *(n for _, n in ranked)]
    assert any(counts == [int(n / k**2 * 6 / np.pi**2) for k in range(1, len(counts) + 1)] for n in n_word)
    assert item.question.startswith(
        "Question: Do not provide any explanation. Please ignore the dots '....'."
    )


def test_qa_prompt_takes_documents_of_the_same_article_first(items_of):
    articles = json.loads((DATA / "squad.json").read_text())["data"]
    by_question = {
        q["question"]: (paragraph["context"], [other["context"] for other in article["paragraphs"]], q)
        for article in articles
        for paragraph in article["paragraphs"]
        for q in paragraph["qas"]
    }
    items = [item for n in (140, 155, 170, 1200) for item in items_of("qa_1", length=n, repeats=4)]
    questions, counts = [], set()
    for item in items:
        context, near, question = by_question[item.question.split("Question: ")[1]]
        assert not question["is_impossible"]
        questions.append(question["question"])
        assert list(item.references) == [answer["text"] for answer in question["answers"]]
        documents = re.findall(r"^Document (\d+):\n(.+)$", item.prompt, re.M)
        assert [int(number) for number, _ in documents] == list(range(1, len(documents) + 1))
        texts = [text for _, text in documents]
        assert context in texts
        assert len(set(texts)) == len(texts)
        counts.add(len(texts))
        if len(texts) > len(near):
            assert set(near) < set(texts)
        else:
            assert set(texts) <= set(near)
    assert counts >= {1, 2, 3, 5}
    # the 4 questions of each length differ
    assert all(len(set(questions[i : i + 4])) == 4 for i in range(0, 16, 4))


@pytest.mark.parametrize("file", ["hotpotqa_published.json", "hotpotqa.jsonl"])
def test_qa_prompt_contains_documents_and_question(file, items_of):
    for item in items_of("qa_2", f"hotpotqa={DATA / file}", repeats=2):
        if "bridges" in item.question:
            assert list(item.references) == ["no"]
        if "Port Hale" in item.question:
            assert "Port Hale\nPort Hale has a ferry. It lands at Skerry." in item.prompt
        assert item.prompt.count("Only give me the answer and do not output any other words.") == 2
        assert item.question.startswith("Answer the question based on the given documents.")
        assert "\n\nThe following are given documents.\n\nDocument 1:\n" in item.prompt
        assert item.opening == "Answer:"


def test_qa_prompt_keeps_all_documents_of_its_question(items_of):
    counts = []
    for length in range(120, 180, 2):
        # the question has two documents, which do not fit into the shortest of these lengths
        with suppress(InputError):
            (item,) = items_of("qa_2", f"hotpotqa={DATA / 'hotpotqa.jsonl'}", length=length)
            assert "clockmaker" in item.question
            counts.append(len(re.findall("^Document", item.prompt, re.M)))
    assert set(counts) == {2, 3}
    assert len(counts) < 30


def test_more_questions_than_the_file_has_are_refused(items_of):
    with pytest.raises(InputError, match="the file for qa_2 has 2 questions; choose fewer repeats"):
        items_of("qa_2", repeats=3)


def test_error_for_a_short_length_names_the_smallest_length(items_of):
    with pytest.raises(InputError, match="niah_single_1 does not fit into 150 tokens") as caught:
        items_of("niah_single_1", length=150)
    # the message only estimates the least length, because samples for different lengths differ by some tokens
    least = int(re.search(r"takes about (\d+)", str(caught.value))[1])
    assert len(items_of("niah_single_1", length=least + 32)) == 1
    with pytest.raises(InputError, match="takes about"):
        items_of("niah_single_1", length=least - 32)


def test_largest_finds_the_largest_number_that_fits():
    for answer, least, most in product([1, 2, 3, 4, 5, 9, 10, 11, 97, 98], [1, 5], [98, 200]):
        tried = []

        def fits(n, answer=answer, least=least, most=most, tried=tried):
            assert least < n <= most
            tried.append(n)
            return n <= answer

        assert largest(fits, least, most) == max(answer, least), (answer, least, most)
        assert len(tried) < 14


def test_words_come_from_wonderwords():
    pytest.importorskip("wonderwords")
    nouns = sources._words("noun")
    assert "creme brulee" in nouns
    assert len(nouns) > 6000
    assert len({*nouns, *sources._words("adjective"), *sources._words("verb")}) > 8000


@pytest.mark.parametrize(
    ("references", "output", "all_of_them", "any_of_them"),
    [
        (["12", "34"], " 12 and 34.", 1, 1),
        (["12", "34"], " 34.", 0.5, 1),
        (["Ada Quill", "A. Quill"], "it was ADA QUILL", 0.5, 1),
        (["a", "b", "c", "d"], "", 0, 0),
        (["two words"], "two\nwords", 0, 0),
        (["two\nwords"], "two\twords", 1, 1),
    ],
)
def test_string_match_scores_answers_like_ruler(references, output, all_of_them, any_of_them):
    assert string_match(output, references, is_any=False) == all_of_them
    assert string_match(output, references, is_any=True) == any_of_them


class Says:
    """A reader whose model always gives the same answer."""

    def __init__(self, text):
        self.text = text

    def ask(self, prompt, n_answer, *, question, opening):
        self.request = prompt, n_answer, question, opening
        return 7

    def write(self, n_max):
        self.n_max = n_max
        return self.text


@pytest.mark.parametrize(
    ("name", "n_max", "score"), [("niah_multiquery", 128, 0.5), ("vt", 30, 0.5), ("qa_1", 32, 1)]
)
@pytest.mark.parametrize("when", ["known", "after"])
def test_answer_length_and_score_depend_on_the_task(name, n_max, score, when, parameters):
    task = tasks.make("ruler", [*parameters, f"question={when}"])
    item = Item(
        "x", "text question?", ["12", "34"], about={"part": name}, question="question?", opening="It is"
    )
    reader = Says(" 12 or 43")
    answer = task.answer(item, reader)
    assert answer.scores == {"string_match": score}
    assert answer.about == {"first_tokens": 7}
    question = "question?" if when == "after" else ""
    assert reader.request == ("text question?", n_max, question, "It is")
    assert reader.n_max == n_max


def test_average_is_the_mean_of_the_tasks_means(parameters):
    scores = [("vt", 8, [1.0, 0.0, 0.5]), ("cwe", 8, [0.2]), ("vt", 4, [1.0])]
    results = [
        {"part": name, "length": length, "scores": {"string_match": score}}
        for name, length, of in scores
        for score in of
    ]
    results.append({"part": "cwe", "length": 8, "scores": {}})
    assert tasks.make("ruler", parameters).summary(results) == {
        "average of 2 tasks, 8 tokens": pytest.approx(0.35)
    }


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (["tasks=vt,wt"], "unknown RULER task wt; choose from niah_single_1"),
        (["tasks=vt", "lengths=0"], "lengths must be numbers of tokens"),
        (["tasks=vt", "repeats=0"], "repeats must be at least 1"),
        (["tasks=vt", "question=before"], "question must be known or after, got 'before'"),
        ([], "niah_single_2 needs a folder of Paul Graham's essays: --set essays=FOLDER; --set tasks="),
        (["essays=x"], "qa_1 needs SQuAD's dev-v2.0.json: --set squad=FILE"),
        (["tasks=vt,qa_2"], "qa_2 needs HotpotQA's hotpot_dev_distractor_v1.json"),
    ],
)
def test_invalid_parameters_give_one_line_errors(parameters, words):
    with pytest.raises(UsageError, match=f"ruler: {words}") as error:
        tasks.make("ruler", parameters)
    assert "\n" not in str(error.value)


def test_wonderwords_is_needed_only_for_tasks_with_words():
    assert tasks.make("ruler", ["tasks=vt,fwe,niah_multikey_3"]).packages == ()
    assert tasks.make("ruler", ["tasks=vt,cwe"]).packages == ("wonderwords",)
    assert tasks.make("ruler", ["tasks=niah_single_1"]).packages == ("wonderwords",)


@pytest.mark.parametrize(
    ("files", "more", "words"),
    [
        (["x"], ["tasks=fwe"], "ruler takes its files as parameters: a folder of Paul Graham's essays"),
        ([], ["tasks=niah_single_2", "essays={tmp}/none"], "cannot read"),
        ([], ["tasks=niah_single_2", "essays={tmp}/empty"], "no text in"),
        ([], ["tasks=qa_1", "squad={tmp}/none"], "cannot read"),
        ([], ["tasks=qa_1", f"squad={DATA / 'qmsum.jsonl'}"], "has a layout that ruler's qa_1 does not know"),
        ([], ["tasks=qa_2", f"hotpotqa={DATA / 'squad.json'}"], "has a layout that ruler's qa_2 does not"),
    ],
)
@pytest.mark.usefixtures("listed")
def test_unusable_files_give_one_line_errors(files, more, words, model, tmp_path):
    (tmp_path / "empty").mkdir()
    task = tasks.make("ruler", [each.format(tmp=tmp_path) for each in more])
    with pytest.raises(InputError, match=words) as error:
        task.items(files, model)
    assert "\n" not in str(error.value)


TEXT = "the heron stood by the mill and the mill stood by the river " * 4
QUESTIONS = ("Where did the heron stand?", "What else is there to say of it?")


def reader_of(model, policy, *, chat=False, **settings):
    """Return a reader. `full` has 1,024 cells. Other policies have 64, and evict 40 tokens at a time."""
    fitted = policies.fit("full", 1024) if policy == "full" else policies.fit(policy, 64, 40)
    template = Template(tiny.CHAT_TEMPLATE, "", "") if chat else None
    return Reader(model, lambda n, n_answer: fitted, Settings(n_batch=32, n_threads=1, **settings), template)


@pytest.fixture(scope="module")
def bytewise(tiny_model):
    """A small random model whose tokens are mostly bytes."""
    with closing(Model(tiny_model(chat_template=tiny.CHAT_TEMPLATE))) as model:
        yield model


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_text_question_and_opening_form_one_prompt(bytewise, chat, after, monkeypatch):
    parts = []
    monkeypatch.setattr(Engine, "read", lambda self, tokens, **_: parts.append(bytes(tokens.tolist())))
    with closing(reader_of(bytewise, "full", chat=chat)) as reader:
        monkeypatch.setattr(bytewise, "tokenize", lambda text, **_: np.frombuffer(text.encode(), np.uint8))
        question = QUESTIONS[0] if after else ""
        n_first = reader.ask(f"{TEXT}{QUESTIONS[0]}", 8, question=question, opening="It ")
        n_read = reader.n_read
    before, between = ("[u]", "[e][a]") if chat else ("", " ")
    whole = f"{before}{TEXT}{QUESTIONS[0]}{between}It "
    first = f"{before}{TEXT}"
    assert b"".join(parts).decode() == whole
    assert n_read == len(whole)
    assert parts[0].decode() == (first if after else whole)
    assert n_first == len(parts[0])


def test_token_across_text_and_question_belongs_to_the_question(model, monkeypatch):
    read = []
    monkeypatch.setattr(Engine, "read", lambda self, tokens, **_: read.append(tokens))
    with closing(reader_of(model, "full")) as reader:
        reader.ask("A mill, a town, a riverbank", 8, question="verbank")
    assert [b"".join(map(model.piece, part.tolist())) for part in read] == [
        b"A mill, a town, a",
        b" riverbank",
    ]


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "tova"])
def test_kept_tokens_do_not_depend_on_a_question_asked_after(bytewise, policy):
    def positions_after(names_question):
        rows = []
        with closing(reader_of(bytewise, policy, prefill="whole")) as reader:
            for question in QUESTIONS:
                n = reader.ask(TEXT + question, 8, question="" if names_question else question, opening="It")
                assert (n == reader.n_read) is names_question
                n_text = len(bytewise.tokenize(TEXT, start=True))
                assert names_question or n == n_text
                pos = reader.engine.cells().pos
                rows.append([sorted(row[(row >= 0) & (row < n_text)]) for row in pos])
                # no row exceeds the budget while the question is read
                assert reader.engine.cells().live.max() < 64
        return rows

    first, second = positions_after(names_question=False)
    assert first == second
    assert {len(row) for row in first} == {24}
    first, second = positions_after(names_question=True)
    assert first != second


@pytest.mark.parametrize("chat", [False, True])
def test_full_cache_gives_the_same_answer_for_known_and_after(bytewise, chat):
    with closing(reader_of(bytewise, "full", chat=chat, type_k="f32", type_v="f32", flash="off")) as reader:
        answers = []
        for question in ("", QUESTIONS[0]):
            reader.ask(TEXT + QUESTIONS[0], 16, question=question, opening="It")
            answers.append(reader.write(16))
    assert answers[0] == answers[1] != ""


def test_a_prompt_beyond_the_full_cache_is_refused(bytewise):
    with (
        closing(reader_of(bytewise, "full")) as reader,
        pytest.raises(InputError, match=r"the prompt \(1,1.. tokens\) does not fit in the full cache"),
    ):
        reader.ask(TEXT * 5, 8, question="river ")


def test_item_hash_depends_on_the_opening():
    about = {"task": "ruler"}
    items = [Item("1", "text", opening=opening) for opening in ("", "It is", "They are")]
    hashes = {of_items.TaskResults(about, [item])._what(item)["item_sha256"] for item in items}
    assert len(hashes) == 3


def test_reply_header_is_held_only_after_the_whole_prompt(tiny_model, monkeypatch):
    """A prompt ends with a reply header, whose tokens are held. A text before a question has no header."""
    n_held = []
    read = Engine.read
    monkeypatch.setattr(
        Engine, "read", lambda self, *part, **more: (n_held.append(self.n_held), read(self, *part, **more))[1]
    )
    path = tiny_model(chat_template=tiny.CHAT_TEMPLATE)
    policy = policies.fit("h2o", 128)
    with closing(Model(path)) as model:
        template = Template(tiny.CHAT_TEMPLATE, "", "")
        n = len(model.tokenize(template.reply_start(), special=True))
        with closing(Reader(model, lambda *_: policy, Settings(), template)) as reader:
            reader.ask("some text. what?", 8, question=" what?")
            reader.ask("some text. what?", 8)
    assert n > 0
    assert n_held == [0, n, n]


SMALL = ("--set", "tasks=fwe,niah_multikey_3,qa_2", "--set", "lengths=1500", "--set", "repeats=2", "-t", 1)
HOTPOT = ("--set", f"hotpotqa={DATA / 'hotpotqa.jsonl'}")


@pytest.mark.parametrize("when", ["known", "after"])
def test_eval_prints_score_and_interval_of_each_ruler_task(when, tiny_model, tmp_path):
    out = tmp_path / "out.jsonl"
    path = tiny_model(chat_template=tiny.CHAT_TEMPLATE)
    command = ("eval", "ruler", "-m", path, *SMALL, *HOTPOT, "--set", f"question={when}")
    options = ("--policy", "h2o", "--budget", "25%")
    done = run_kvtool(*command, *options, "--records", out)
    assert done.returncode == 0, done.stderr
    results = records.read(out)
    names = ["niah_multikey_3", "fwe", "qa_2"]
    # the first item of each task is asked before the second item of any task
    assert [record["part"] for record in results] == names * 2
    for record in results:
        assert record["chat"] is True
        assert record["task_params"]["question"] == when
        n_most = 1500 - PARTS[record["part"]].n_max + len("[u][e][a]") + 1
        assert record["prompt_tokens"] <= n_most
        assert record["budget_cells"] == record["prompt_tokens"] // 4
        assert (record["first_tokens"] == record["prompt_tokens"]) is (when == "known")
        score = string_match(record["output"], record["references"], is_any=record["part"] == "qa_2")
        assert record["scores"] == {"string_match": score}
    table = done.stdout.split("string_match by part and length")[1].split("\n")
    assert [line.split()[0] for line in table if line] == ["part", *sorted(names)]
    assert table[2].split() == ["part", "1500", "95", "%", "interval", "items"]
    assert table[3].split() == ["fwe", "0.000", "0.000", "to", "0.658", "2"]
    assert "average of 3 tasks, 1500 tokens: 0" in done.stdout
    done = run_kvtool(*command, *options, "--json")
    by = json.loads(done.stdout.splitlines()[-1])["by"]
    assert [(each["part"], each["length"]) for each in by] == [(name, 1500) for name in sorted(names)]
    assert by[0]["string_match"] == {"mean": 0, "low": 0, "high": pytest.approx(0.658, abs=1e-3), "n": 2}
