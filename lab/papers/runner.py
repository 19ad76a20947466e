"""Repeat the papers' experiments, and write their tables.

    python -m lab.papers plan [ID ...]        the missing commands, and their minutes on one core
    python -m lab.papers files [ID ...]       the files that DATA needs
    python -m lab.papers run DATA [ID ...]    run the missing commands of these experiments, or of all
    python -m lab.papers tables               write the tables of the documents from lab/papers/records
    python -m lab.papers run DATA [ID ...] -m MODEL --results FOLDER        run with another model
    python -m lab.papers show ID ... --results FOLDER                       print the other model's tables

`run` also writes the documents' tables, unless `--results` names another folder.

An experiment is a list of commands, mostly `kvtool compare` and `kvtool eval`; the documents show them. DATA
is a folder with the texts and data sets: lab/papers/README.md has their sources. Some runs need other models
than kvtool's default: `--models` is the folder with these. `--work` keeps all results; lab/papers/records
keeps scores of items and of blocks of tokens for the tables, and no text of a data set. Commands whose
results are in lab/papers/records do not run again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from kvtool.measure import records
from kvtool.system import interrupt
from kvtool.system.files import replacing
from lab.benchmarks.common import make_parser, note
from lab.papers import claims, index, sharing, tables
from lab.papers.experiments import EXPERIMENTS, RUNS
from lab.papers.lines import Ask, Line, is_program, shell
from lab.papers.tables import LABORATORY, RESULTS, ROOT

DOCUMENTS = (
    *(
        LABORATORY / f"{name}.md"
        for name in ("README", "weightedkv", "buzz", "bumblebee", "corm", "fading", "ruler", "policy-numbers")
    ),
    ROOT / "docs" / "which-policy.md",
)


def filled(text: str) -> str:
    """A document with new tables from the records."""
    text = tables.fill(text)
    for mark, rows in (("index", index.rows), ("claims", claims.rows), ("sharing", sharing.rows)):
        text = tables.fill_between(text, mark, rows)
    return text


def missing(name: str, results: Path = RESULTS) -> list[Ask]:
    """The commands of a run whose results are not yet in the records."""
    return list(RUNS[name].missing(records.read(results / f"{name}.jsonl"), name))


def run(
    data: Path,
    work: Path,
    names: Sequence[str],
    more: Sequence[str] = (),
    results: Path = RESULTS,
    models: Path = Path(),
    model: str = "",
) -> None:
    """Run the missing commands of these runs. After each, keep the part of its results that tables need.

    more: further options of each command. models: folder of the runs' models. model: a model that is used
    instead of the runs' models. Ends the program if a command fails.
    """
    for name in names:
        asked, path = RUNS[name], results / f"{name}.jsonl"
        for ask in missing(name, results):
            note(f"{name}: {shell(ask.command, model or asked.model)}")
            store = work / Path(asked.model or "default").stem / f"{ask.store}.jsonl"
            store.parent.mkdir(parents=True, exist_ok=True)
            path_of_model = model or (str(models / asked.model) if asked.model else "")
            chosen = ["-m", path_of_model] if path_of_model else []
            words = [str(data / part) if "/" in part else part for part in ask.command]
            if ask.goes_on:
                _python("-m", *words, *chosen, *more, "--json", str(store))
            elif is_program(ask.command):
                _script(store, [*words, *chosen, *more])
            else:
                _kvtool(*words, *chosen, *more, "--records", str(store), "--resume")
            _keep(path, asked.lines(records.read(store)))


def files(names: Iterable[str]) -> list[str]:
    """Texts and data sets that these runs read, relative to DATA."""
    commands = (command for name in names for command in RUNS[name].commands())
    return sorted({part for command in commands for part in command if "/" in part})


def _lacking(runs: Sequence[str], data: Path, results: Path, models: Path, model: str) -> list[Path]:
    """Files that the missing commands need and that do not exist."""
    left = [name for name in runs if missing(name, results)]
    named = {RUNS[name].model for name in left} - {""} if not model else set()
    return [
        path
        for path in (*(data / file for file in files(left)), *map(models.joinpath, sorted(named)))
        if not path.exists()
    ]


def _keep(path: Path, lines: Iterable[Line]) -> None:
    """Add these lines, replacing lines of the same policy, budget and text.

    Ends the program if the file has lines of another text with the same name.
    """
    new = [_rounded(line) for line in lines]
    places = {_place(line) for line in new}
    hashes = {_text(line): line["text_sha256"] for line in new if "text_sha256" in line}

    def added(old: list[Line]) -> list[Line]:
        kept = [line for line in old if _place(line) not in places]
        for line in kept:
            if (known := hashes.get(_text(line))) and line.get("text_sha256", known) != known:
                sys.exit(f"{path} has results of another text that is called {line['of']}; remove them first")
        return kept + new

    rewrite(path, added)


def rewrite(path: Path, change: Callable[[list[Line]], Iterable[Line]]) -> None:
    """Replace the lines of a file by the result of `change`. If this fails, the file does not change."""
    lines = change(records.read(path))
    with replacing(path) as file:
        for line in lines:
            file.write(json.dumps(line).encode() + b"\n")


def _place(line: Line) -> tuple[object, ...]:
    return tuple(line.get(name) for name in ("label", "budget", "of", "tokens", "part"))


def _text(line: Line) -> tuple[object, ...]:
    return tuple(line.get(name) for name in ("of", "tokens", "model"))


def _kvtool(*arguments: str) -> str:
    return _python("-m", "kvtool", *arguments)


def _python(*arguments: str) -> str:
    """The stdout of a Python program. Exits if that program fails. Raises KeyboardInterrupt after Ctrl-C."""
    # the user's own defaults must not change results
    clean = {name: value for name, value in os.environ.items() if not _is_setting(name)}
    clean["KVTOOL_CONFIG"] = os.devnull
    done = subprocess.run(
        [sys.executable, *arguments], env=clean, stdout=subprocess.PIPE, check=False, text=True
    )
    if done.returncode in (interrupt.EXIT_CODE, -signal.SIGINT):
        raise KeyboardInterrupt
    if done.returncode:
        sys.exit(f"python {' '.join(arguments)}: exit code {done.returncode}")
    return done.stdout


def _is_setting(name: str) -> bool:
    return name.startswith("KVTOOL_") and name not in ("KVTOOL_CACHE", "KVTOOL_WHEELS")


def _script(path: Path, arguments: Sequence[str]) -> None:
    """Run a program of this folder, which writes one record, and append the record to the file."""
    with tempfile.TemporaryDirectory() as folder:
        result, started = Path(folder) / "result.json", time.monotonic()
        _python("-m", *arguments, "--json", str(result))
        records.append(path, json.loads(result.read_text()) | {"seconds": time.monotonic() - started})


def _rounded(line: Line) -> Line:
    """Return the line with six digits per number, which is more than the standard errors need."""
    scores = {
        name: [value if value is None else float(f"{value:.6g}") for value in values]
        for name, values in line["scores"].items()
    }
    return line | {"scores": scores, "seconds": round(line["seconds"], 1)}


def runs_of(names: Iterable[str], others: bool = False) -> tuple[str, ...]:
    """The runs of these experiments.

    others: True for only the runs of each experiment's first model, which another model then replaces.
    """
    runs = []
    for name in names:
        experiment = EXPERIMENTS[name]
        runs += tables.of_model(experiment, tables.models_of(name)[0]) if others else experiment.runs
    # a run may belong to several experiments
    return tuple(dict.fromkeys(runs))


def plan(names: Iterable[str], results: Path = RESULTS) -> Iterator[str]:
    """A line for each experiment and model: the minutes of its runs and of the missing commands."""
    names = list(names)
    for name in names:
        for model in tables.models_of(name):
            runs = tables.of_model(EXPERIMENTS[name], model)
            n, n_all, minutes, left = _cost(runs, results)
            there = f"{n} of {n_all} commands missing, about {left} minutes" if n else "all there"
            yield f"{name} ({tables.NAMES[model]}): {minutes} minutes; {there}"
    _, _, minutes, left = _cost(runs_of(names), results)
    yield f"in all {minutes / 60:.1f} hours of one core, of which {left / 60:.1f} are missing"


def _cost(runs: Iterable[str], results: Path) -> tuple[int, int, int, int]:
    """Return the numbers of missing and of all commands, and the minutes of all and of missing commands."""
    n_missing = n_all = minutes = 0
    left = 0.0
    for name in runs:
        n, n_of_run = len(missing(name, results)), len(list(RUNS[name].commands()))
        n_missing, n_all, minutes = n_missing + n, n_all + n_of_run, minutes + RUNS[name].minutes
        left += RUNS[name].minutes * n / n_of_run
    return n_missing, n_all, minutes, round(left)


def main() -> None:
    parser = make_parser(__doc__)
    parser.prog = "python -m lab.papers"
    commands = parser.add_subparsers(dest="command", required=True)
    planning, naming = commands.add_parser("plan"), commands.add_parser("files")
    running = commands.add_parser("run")
    running.add_argument("data", type=Path, metavar="DATA")
    showing = commands.add_parser("show")
    for each in (planning, naming, running, showing):
        each.add_argument("names", nargs="*", default=[], metavar="ID", help="; ".join(EXPERIMENTS))
    running.add_argument("--models", type=Path, default=Path(), help="folder of the runs' own models")
    running.add_argument("-m", "--model", default="", help="another model in place of all; needs --results")
    running.add_argument("-t", "--threads", type=int, default=1)
    running.add_argument("--work", type=Path, default=ROOT / "build" / "papers", help="where all results are")
    for each in (running, showing):
        each.add_argument("--results", type=Path, default=RESULTS, help="where the tables' part of them is")
    commands.add_parser("tables")
    args = parser.parse_args()
    names = getattr(args, "names", None) or list(EXPERIMENTS)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        parser.error(f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}")
    if args.command == "plan":
        print("\n".join(plan(names)))
    elif args.command == "files":
        print("\n".join(files(runs_of(names))))
    elif args.command == "show":
        if not args.results.is_dir():
            parser.error(f"no folder {args.results}")
        others = args.results != RESULTS
        print("\n\n".join(tables.render(name, args.results, others) for name in names))
    elif args.command == "run":
        _measure(parser, args, names)
    if args.command == "tables" or (args.command == "run" and args.results == RESULTS):
        for path in DOCUMENTS:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


def _measure(parser: ArgumentParser, args: Namespace, names: Sequence[str]) -> None:
    """Run the missing commands, after checking that their files exist."""
    if args.model and args.results == RESULTS:
        parser.error("-m needs --results: lab/papers/records is of the models that the documents name")
    runs = runs_of(names, others=bool(args.model))
    if lacking := _lacking(runs, args.data, args.results, args.models, args.model):
        paths = ", ".join(map(str, lacking))
        parser.error(f"not there: {paths}; lab/papers/README.md says where they are from")
    args.results.mkdir(parents=True, exist_ok=True)
    if not any(missing(name, args.results) for name in runs):
        note("all of it is there")
    work = args.work / Path(args.model).stem
    run(args.data, work, runs, ["-t", str(args.threads)], args.results, args.models, args.model)
