"""Sort the numbers of the records into the rows and columns of a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lab.papers.experiments.kinds import Place, ScoreTable
from lab.papers.lines import Line
from lab.papers.samples import SCORES, Measurements


def samples(lines: Sequence[Line], table: ScoreTable) -> dict[Place, Measurements]:
    """Return the numbers for each place (row and column) of a table.

    A line without a budget is in the column of each budget that was measured with the line's model. An item
    that is missing in any row of a column is left out of all rows of this column.
    """
    lines = [line for line in lines if is_about(table, line)]
    lines = [line for line in lines if not table.rows or line[table.row] in (*table.rows, table.apart)]
    measured = _budgets(lines)
    places: dict[Place, Measurements] = {}
    lacking = set()
    for line in lines:
        score = table.scores.get(line["task"], "") if table.scores else table.score
        if not score:
            continue
        values, of_text = _values(line, score), bool(line.get("weights", {}).get(SCORES[score].of or score))
        budgets = [name for name in measured[line.get("model")] if not table.budgets or name in table.budgets]
        unlimited = budgets or [None] * (not table.budgets)
        for budget in {line["budget"]}.intersection(budgets) if line["budget"] else unlimited:
            for column, is_pooled in _columns(line | {"budget": budget}, table):
                place = line[table.row], column
                strata = table.strata if is_pooled else {}
                sample = Measurements(score, of_text, table.same_item and is_pooled, strata)
                of_place = _behind(values, int(budget)) if table.late and budget else values
                places.setdefault(place, sample).values.update(of_place)
                if score in ("device", "host") and not values:
                    lacking.add(place)
    _share(places)
    whole = (place for place, sample in places.items() if _is_whole(place, sample, table))
    # do not show a mean of bytes if the bytes of some texts are not known
    places = {place: places[place] for place in whole if place not in lacking}
    if table.apart:
        return {
            (row, column): sample.apart(places[table.apart, column])
            for (row, column), sample in places.items()
            if row != table.apart and (table.apart, column) in places
        }
    return places


def is_about(table: ScoreTable, line: Line) -> bool:
    """True if the table counts the file or data set of this line."""
    return not table.of or line["of"] in table.of


def _budgets(lines: Sequence[Line]) -> dict[str | None, list[str]]:
    """The measured budgets of each model."""
    budgets: dict[str | None, list[str]] = defaultdict(list)
    for line in lines:
        if line["budget"] and line["budget"] not in budgets[line.get("model")]:
            budgets[line.get("model")].append(line["budget"])
    return budgets


def _share(places: Mapping[Place, Measurements]) -> None:
    """Leave out items that are missing in any row of their column."""
    rows = defaultdict(list)
    for (_, column), sample in places.items():
        # a single number is already a mean, from which no item can be left out
        if len(sample.values) > 1:
            rows[column].append(sample.values)
    for column in rows.values():
        in_all = set.intersection(*(set(values) for values in column))
        for values in column:
            for item in values.keys() - in_all:
                del values[item]


def _is_whole(place: Place, sample: Measurements, table: ScoreTable) -> bool:
    """True if a place (row and column) has enough values to be shown.

    A pooled column that lists its data sets, such as LongBench's EN, needs values from each of them. In all
    other columns, any value is enough.
    """
    asked = table.pooled.get(place[1].partition(", ")[0]) or frozenset()
    return bool(sample.values) and asked <= {of for of, _ in sample.values}


def _columns(line: Line, table: ScoreTable) -> Iterator[tuple[str, bool]]:
    """Yield the heading of each column that a line belongs to, and True if the column is pooled."""
    first, *rest = (table.names.get(str(line[name]), str(line[name])) for name in table.by)
    yield ", ".join([first, *rest]), False
    for heading, members in table.pooled.items():
        if members is None or str(line[table.by[0]]) in members:
            yield ", ".join([heading, *rest]), True


def is_pooled(column: str, table: ScoreTable) -> bool:
    """True if a column has the lines of several other columns."""
    return column.partition(", ")[0] in table.pooled


def _values(line: Line, score: str) -> dict[tuple[str, str], tuple[float, float]]:
    score = SCORES[score].of or score
    values = _rouge(line["scores"]) if score == "rouge" else _of_line(line).get(score, [])
    weights = line.get("weights", {}).get(score, [1] * len(values))
    # older lines do not have all scores
    items = line.get("items", range(len(values))) if values else ()
    return {
        (line["of"], str(item)): (value, weight)
        for item, value, weight in zip(items, values, weights, strict=True)
        if value is not None
    }


def _behind(
    values: Mapping[tuple[str, str], tuple[float, float]], budget: int
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the blocks that begin after the first `budget` tokens."""
    read, kept = 0.0, {}
    for place, (value, n_token) in values.items():
        if read >= budget:
            kept[place] = value, n_token
        read += n_token
    return kept


def _of_line(line: Line) -> dict[str, list[float | None]]:
    """The scores of a line, its bytes in MiB, and the tokens that a row holds."""
    scores = line["scores"]
    sizes = zip(("device", "host"), line.get("bytes", ()), strict=False)
    scores = scores | {name: [size / 2**20] for name, size in sizes}
    if "tokens" in line and "evicted" in scores:
        scores["holds"] = [line["tokens"] * (1 - share) for share in scores["evicted"]]
    return scores


def _rouge(scores: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    """Return each item's contribution to the geometric mean of the mean ROUGE-1, ROUGE-2 and ROUGE-L.

    Contributions are linear in the item's three scores (delta method). Their mean is the geometric mean, and
    the standard error of their mean is the standard error of the geometric mean. If one of the three means is
    0, the first item gets 0 and the other items None, so that there is no standard error.
    """
    items = list(zip(*(scores[name] for name in ("rouge1", "rouge2", "rougeL")), strict=True))
    means = np.mean([item for item in items if None not in item], axis=0)
    if not means.all():
        return [0.0] + [None] * (len(items) - 1)
    whole = np.prod(means) ** (1 / 3)
    return [None if None in item else float(whole * np.mean(item / means)) for item in items]
