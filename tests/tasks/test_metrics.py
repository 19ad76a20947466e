"""The scores of tasks: published examples, values worked out by hand, and brute force for small cases."""

from __future__ import annotations

import pytest

from kvtool.tasks import metrics


def test_squad_scores_equal_the_example_of_the_evaluate_library():
    # the example "partial match" in the library's metric card of SQuAD has 66.67 for both scores
    pairs = [("1976", "1976"), ("Beyonce", "Beyoncé and Bruno Mars"), ("climate change", "climate change")]
    for metric in (metrics.exact_match, metrics.f1):
        assert sum(metric(*pair) for pair in pairs) / 3 == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("output", "reference", "em", "f1"),
    [
        ("The Cat!", "cat", 1, 1),
        ("an apple, a day", "apple day", 1, 1),
        ("the cat sat", "cat sat down", 0, 2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3)),
        # a word is counted as often as both texts contain it
        ("dog dog dog", "dog dog cat", 0, 2 / 3),
        # punctuation is removed before articles, as in SQuAD's script
        ("a.m.", "am", 1, 1),
        ("the", "", 1, 0),
        ("theatre", "atre", 0, 0),
    ],
)
def test_squad_ignores_case_punctuation_articles_and_space(output, reference, em, f1):
    assert metrics.exact_match(output, reference) == em
    assert metrics.f1(output, reference) == pytest.approx(f1)


def test_the_best_reference_counts():
    assert metrics.best(metrics.f1, "in Arden", ["Arden", "in Arden", "Dunmere"]) == 1
    assert metrics.best(metrics.f1, "in Arden", []) == 0


def test_subspan_is_1_if_the_output_contains_the_reference():
    assert metrics.subspan("It was built by Ada Quill, in 1841.", "ada quill") == 1
    assert metrics.subspan("Ada", "Ada Quill") == 0


@pytest.mark.parametrize(
    ("output", "rouge1", "rouge2", "rouge_l"),
    # values of rouge_score's own tests, for the target "testing one two"
    [("testing", 1 / 2, 0, 1 / 2), ("testing one", 4 / 5, 2 / 3, 4 / 5), ("testing two", 4 / 5, 0, 4 / 5)],
)
def test_rouge_equals_the_rouge_score_package(output, rouge1, rouge2, rouge_l):
    assert metrics.rouge(output, "testing one two") == pytest.approx(
        {"rouge1": rouge1, "rouge2": rouge2, "rougeL": rouge_l}
    )


def test_rouge_stems_words():
    assert metrics.rouge("the dogs barked", "the dog barks")["rouge1"] == 1


@pytest.mark.parametrize(
    ("output", "reference", "score"),
    [
        # the output names one class
        ("Definition", "Definition", 1),
        # the output names two classes, so it scores half
        ("Definition or Date", "Definition", 1 / 2),
        ("Date", "Definition", 0),
        # "Individual" is a part of the right name, so it does not count as a second class
        ("Individual group", "Individual group", 1),
        ("nothing", "Date", 0),
    ],
)
def test_classification_divides_by_the_number_of_named_classes(output, reference, score):
    classes = ["Individual", "Definition", "Date", "Individual group"]
    assert metrics.classification(output, reference, classes) == score


def test_classification_drops_only_the_first_of_two_partial_names():
    assert metrics.classification("abc", "abc", ["a", "b", "abc"]) == 1 / 2


def test_counting_and_retrieval_scores_are_shares_of_numbers():
    assert metrics.share_of_numbers("There are 12 of 12, not 3.", "12") == pytest.approx(2 / 3)
    assert metrics.share_of_numbers("many", "12") == 0
    assert metrics.retrieval("Paragraph 7, or 8?", "Paragraph 7") == 1 / 2
    assert metrics.retrieval("段落17", "段落7") == 0
    assert metrics.retrieval("段落7", "段落7") == 1


def test_code_similarity_compares_the_first_line_of_code():
    # the lines have 13 of 14 characters in common, which is 2 * 13 / 28 or 92.9 percent
    assert metrics.code_similarity("\n# first\n```\nx = area(1, 2)\ny", "x = area(1, 3)") == 0.93
    assert metrics.code_similarity("return 1", "return 1") == 1
    assert metrics.code_similarity("# only a comment", "return 1") == 0


def test_longbench_rouge_l_uses_the_longest_common_subsequence():
    # the longest common subsequence is "boat sank". Recall is 2/3, and precision is 2/2. Words are not
    # stemmed
    assert metrics.rouge_l("boat sank", "boat quickly sank") == pytest.approx(0.8, abs=1e-6)
    assert metrics.rouge_l("boats sank", "boat quickly sank") == pytest.approx(0.4, abs=1e-6)
    assert metrics.rouge_l("", "boat") == 0
    assert metrics.rouge_l(".", "boat") == 0


def test_chinese_texts_are_scored_by_words():
    # 小猫 喜欢 鱼 is compared with 小猫 喜欢 牛奶: two of three words are equal
    assert metrics.f1_zh("小猫喜欢鱼。", "小猫，喜欢牛奶") == pytest.approx(2 / 3)
    assert metrics.rouge_l_zh("小猫喜欢鱼", "小猫喜欢牛奶") == pytest.approx(2 / 3, abs=1e-6)
    assert metrics.f1_zh("，。", "小猫") == 0
