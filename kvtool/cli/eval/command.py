"""`kvtool eval`: run tasks that measure how well a model works under a policy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from kvtool import parameters, policies
from kvtool.cli import completion, output
from kvtool.cli.console import say, table, table_console
from kvtool.cli.declared import JsonLines, options
from kvtool.cli.eval.table import counted, show, shown
from kvtool.cli.locate import locate_model
from kvtool.cli.progress import tokens_progress
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.errors import InputError, UsageError
from kvtool.llama.sampling import Sampling
from kvtool.options import Options, Range, declared, option, redeclared, repeated
from kvtool.system import interrupt
from kvtool.system.texts import exists, json_text

if TYPE_CHECKING:
    from kvtool.llama.loaded.model import Model
    from kvtool.measure.records import Record
    from kvtool.models.header import ModelInfo
    from kvtool.policies import PolicySpec
    from kvtool.policy import Policy
    from kvtool.tasks.reader import Reader
    from kvtool.tasks.results import TaskResults
    from kvtool.tasks.task import Task

    PolicyFor = Callable[[int, int], Policy]

_STEP = 1024
"""Cache sizes of `full` are rounded up to multiples of this number of cells.

Prompts of similar lengths then need the same size, and can use the same cache.
"""


@dataclass(frozen=True)
class _EvalRun(RunOptions):
    hidden: ClassVar = ("explain",)

    budget: str = redeclared(
        RunOptions,
        "budget",
        "20%",
        help="Cache size: tokens kept per KV head (512), share of each prompt (20%, rounded down), "
        "or bytes (64M or 64MiB).",
        default_text="20%",
    )


@dataclass(frozen=True)
class _EvalSampling(Options):
    temp: float = redeclared(
        Sampling,
        "temp",
        help="Temperature of answers; 0 picks the most likely tokens. Above 0 the other samplers are as "
        f"in kvtool generate: --top-k {GenerationOptions.top_k}, --top-p {GenerationOptions.top_p}, "
        f"--min-p {GenerationOptions.min_p}.",
    )
    seed: int = redeclared(
        GenerationOptions,
        "seed",
        0,
        help="Random seed of each answer; needs --temp.",
        default_text=True,
        valid=Range(0),
        read=None,
    )

    def sampling(self) -> Sampling | None:
        """Return the settings of the sampler, or None to take the most likely tokens (temperature 0)."""
        return GenerationOptions(temp=self.temp).sampling() if self.temp else None


@dataclass(frozen=True)
class _EvalOptions(Options):
    settings: tuple[str, ...] = option(
        "--set NAME=VALUE",
        (),
        "Set a parameter of the task (kvtool eval explains them). Repeatable.",
        default_text=False,
        read=repeated,
    )
    limit: int | None = option(
        "--limit N", None, "Ask only the first N items.", default_text="all", valid=Range(1)
    )
    chat: bool | None = option(
        "--chat/--raw", None, "Ask in the chat template or as plain text.", default_text="the task's own"
    )
    max_prompt: int | None = option(
        "--max-prompt N",
        None,
        "Cut the middle out of prompts longer than N tokens, unless a fact is hidden in them.",
        valid=Range(16),
        default_text="the trained context",
    )
    records: Path | None = option(
        "--records FILE", None, "Append the record of each answered item to this file, one JSON line each."
    )
    resume: bool = option("--resume", False, "Continue the file of --records: ask only the missing items.")


@options
def evaluate(
    *,
    task: Annotated[
        str | None,
        typer.Argument(
            metavar="[TASK]",
            help="A task. Without one, all tasks are listed.",
            show_default=False,
            autocompletion=completion.tasks,
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="Files that the task reads.",
            show_default=False,
        ),
    ] = None,
    args: _EvalOptions,
    eval_run: _EvalRun,
    sampler: _EvalSampling,
    as_json: JsonLines = False,
) -> None:
    """Ask a task's questions under a policy, and score the answers.

    Without a task, it lists all tasks and explains their parameters.
    """
    from kvtool import tasks

    run: RunOptions = eval_run
    if task is None:
        _check_none_typed(args, eval_run, sampler)
        _list(as_json=as_json)
        return
    chosen = tasks.make(task, args.settings)
    output.check_packages(task, chosen.packages, "eval")
    files = files or []
    _check_files(task, chosen, files)
    records_path = output.records_path(args.records, args.resume)
    # check the temperature and the seed before the model is downloaded
    _check_drawing(sampler, chosen, task)

    from kvtool.config import archive, notes
    from kvtool.config.model import loaded_model
    from kvtool.config.opening import check, replace_recall

    spec = check(run)
    run, info, n_ctx = locate_model(run)
    _check_budget(spec, run, info, n_ctx)

    from kvtool.measure.records import NotStored
    from kvtool.tasks import results as of_items

    as_chat = chosen.chat if args.chat is None else args.chat
    placed_notes: list[str] = []
    with (
        loaded_model(run, info, guarded=True, say=placed_notes.append) as model,
        ExitStack() as stack,
    ):
        run, note = replace_recall(run, spec.kind, model.layers)
        say(notes.gpu_note(run), *placed_notes, note)
        run, spec = archive.with_type(run, info), check(run)
        reader = stack.enter_context(
            closing(_reader(spec, run, n_ctx, model, as_chat, args.max_prompt, sampler))
        )
        items = chosen.items(files, model)[: args.limit]
        about = {
            "task": task,
            "task_params": asdict(chosen),
            "chat": as_chat,
            "max_prompt": reader.n_prompt,
            # the seed is left out if nothing is sampled, because it has no effect
            "temp": sampler.temp or None,
            "seed": sampler.seed if sampler.temp else None,
            **_about(spec, run, info.path),
        }
        results = of_items.TaskResults(about, items, records_path, one_stream=chosen.one_stream)

        try:
            _measure(chosen, results, reader, len(items), as_json=as_json)
        except NotStored:
            # a full disk does not lose the finished results
            _finish(chosen, results, as_json=as_json)
            raise
    _finish(chosen, results, as_json=as_json)


def _check_none_typed(*given: Options) -> None:
    """Raise UsageError if one of the options was typed, because without a task they have no effect."""
    for options_given in given:
        for name, its in declared(type(options_given)).items():
            if name in options_given.typed:
                # for the option --chat/--raw, name only --chat
                flag = its.name.partition("/")[0]
                raise UsageError(f"{flag} needs a task; `kvtool eval` lists them")


def _check_files(task: str, chosen: Task, files: list[Path]) -> None:
    """Raise UsageError if the task needs a file and none is named. Raise InputError if one does not exist."""
    if chosen.needs_files and not files:
        raise UsageError(f"{task} needs a file; name it after the task")
    for file in files:
        if not exists(str(file)):
            raise InputError(f"there is no file {file}")


def _check_drawing(sampler: _EvalSampling, chosen: Task, task: str) -> None:
    """Raise UsageError if the temperature or the seed is out of range or has no effect."""
    if sampler.temp and not chosen.uses_sampling:
        raise UsageError(f"{task} takes no --temp: it samples no answers")
    if "seed" in sampler.typed and "temp" not in sampler.typed and not sampler.temp:
        raise UsageError("--seed has no effect without a temperature; add --temp T")
    sampler.sampling()


def _check_budget(spec: PolicySpec, run: RunOptions, info: ModelInfo, n_ctx: int) -> None:
    """Raise UsageError for a budget that cannot work. Called before the model is loaded."""
    from kvtool.config import budget, sizes

    text = (run.budget or "").strip()
    if spec.kind.evicts and text.endswith("%"):
        sizes.percent(text)
        spec.smallest_budget()
    else:
        budget.fit_cells(spec, run, info, n_ctx)


def _policy_for(
    spec: PolicySpec, run: RunOptions, n_ctx: int, model: Model, n_held: int
) -> tuple[PolicyFor, int]:
    """Return (function, batch size). The function makes the policy for an item. Raises UsageError.

    The function takes the lengths of the prompt and of the answer, in tokens. n_held: number of tokens that
    are never evicted.
    """
    from kvtool.config import budget, sizes
    from kvtool.engine.checks import for_model

    n_batch = run.n_batch or run.default_n_batch
    if not spec.kind.evicts:
        return lambda n, n_answer: spec.fit(min(-(-(n + n_answer) // _STEP) * _STEP, n_ctx)), n_batch
    share = (run.budget or "").strip()
    if not share.endswith("%"):
        fitted = budget.fit_run(spec, run, model.layers, n_ctx, n_ctx, model.n_ctx_train)
        say(fitted.note)
        return lambda n, n_answer: fitted.policy, fitted.n_batch
    percent = sizes.percent(share)
    least = spec.smallest_budget(n_held, partial(for_model, model=model))
    return lambda n, n_answer: spec.fit(max(min(sizes.share(percent, n), n_ctx), least)), n_batch


def _reader(
    spec: PolicySpec,
    run: RunOptions,
    n_ctx: int,
    model: Model,
    as_chat: bool,
    max_prompt: int | None,
    sampler: _EvalSampling,
) -> Reader:
    from kvtool.chats.prompt import template_of
    from kvtool.config.opening import settings_of
    from kvtool.tasks.reader import N_OUTPUT, Reader, n_held

    template = template_of(model, run.chat_template) if as_chat else None
    held = n_held(model, template)
    policy_for, n_batch = _policy_for(spec, run, n_ctx, model, held)
    settings = settings_of(run, n_ctx, n_batch, N_OUTPUT)
    beyond = spec.kind.evicts
    return Reader(model, policy_for, settings, template, max_prompt, beyond, sampler.sampling(), sampler.seed)


def _measure(task: Task, results: TaskResults, reader: Reader, n_items: int, *, as_json: bool) -> None:
    """Ask the items that have no record yet, and show the progress. With --json, print each record."""
    name = label = results.about["task"]

    def stopped() -> str:
        # a task with one stream for all items cannot resume, so do not report how many items are finished
        in_part = not task.one_stream and (results.path or not as_json)
        return output.stopped(results.path, len(results), n_items, "items") if in_part else "stopped"

    has_told = False
    with (
        output.stopped_by_signals(),
        interrupt.ending(stopped),
        tokens_progress(name, n_items, len(results)) as step,
    ):

        def reading(done: int, n: int) -> None:
            """Show how much of a prompt has been read. Report the first prompt that is too long."""
            nonlocal has_told
            if not has_told and (line := _too_long(reader, n)):
                has_told = True
                say(line)
            step(len(results), f"{label}, reading {done:,} of {n:,} tokens")

        reader.while_reading = reading
        for record in results.measure(task, reader):
            if as_json:
                typer.echo(json_text(record))
            label = f"{name}: {_in_short(results.records)}"
            step(len(results), label)


def _too_long(reader: Reader, n: int) -> str | None:
    """Return a note if a prompt of n tokens is cut or is longer than the trained context, else None."""
    n_most = reader.model.n_ctx_train
    if reader.is_cut:
        return f"a prompt does not fit in {reader.n_prompt:,} tokens (--max-prompt): its middle is cut out"
    if n > n_most:
        return f"a prompt has {n:,} tokens, more than the trained context ({n_most:,}); it is not cut"
    return None


def _about(spec: PolicySpec, run: RunOptions, path: Path) -> dict[str, object]:
    """Return a record's fields that describe the model, the options and the versions, but not the task."""
    from kvtool.config import archive
    from kvtool.measure import records
    from kvtool.models.download import sha256

    kind = spec.kind
    recalls = kind.has_recall()
    limit = archive.limit(run.archive, run.archive_file)
    return {
        **records.identity(run, path),
        "chat_template_sha256": sha256(Path(run.chat_template)) if run.chat_template else None,
        "policy": run.policy,
        "policy_sha256": policies.file_sha256(run.policy),
        "options": list(run.options),
        "budget": run.budget if kind.evicts else None,
        **run.record_values(),
        "archive": (limit or None) if recalls else None,
        "archive_type": run.archive_type if recalls else None,
    }


def _list(*, as_json: bool) -> None:
    from rich.table import Column
    from rich.text import Text

    from kvtool import tasks

    listed = list[dict[str, Any]]()
    for name in tasks.names():
        kind = tasks.load(name)
        summary = (sys.modules[kind.__module__].__doc__ or "").split("\n")[0].partition(": ")[2]
        params, explained = parameters.defaults(kind), parameters.explained(kind)
        listed.append({"name": name, "what": summary, "params": params, "explained": explained})
    if as_json:
        typer.echo(json_text(listed, indent=2))
        return
    rows: list[tuple[str | Text, str]] = []
    for task in listed:
        rows.append((Text(task["name"], "bold"), task["what"]))
        for name, value in task["params"].items():
            # an explanation says what an empty value means
            default = f" [default: {shown(value)}]" if value not in ("", ()) else ""
            rows.append((f"  {name}", f"{task['explained'][name]}{default}"))
    columns = Column("task", no_wrap=True), "what it asks, and its parameters (--set NAME=VALUE)"
    table_console().print(table(columns, rows))


def _in_short(found: Sequence[Record]) -> str:
    """Return the current means as text, without intervals, because computing intervals is slow."""
    from kvtool.tasks.results import scores

    return ", ".join(f"{name} {sum(of) / len(of):.3f}" for name, of in scores(found).items())


def _finish(task: Task, results: TaskResults, *, as_json: bool) -> None:
    from kvtool.tasks import results as of_items

    means = of_items.means(results.records)
    if errors := [record["error"] for record in results.records if "error" in record]:
        line = f"{len(errors)} of {counted(len(results))} failed: {errors[0]}"
        if len(errors) == len(results):
            raise InputError(line)
        # some items may not fit in the cache under this policy: report the errors, and score all other items
        say(line)
    if cut := sum(record.get("is_cut", False) for record in results.records):
        were, their = ("was", "its") if cut == 1 else ("were", "their")
        say(f"{cut} of {len(results)} prompts {were} too long; {their} middle was cut out")
    groups = of_items.broken_down(results.records, task.by) if task.by else {}
    compared = results.differences()
    if as_json:
        summary = {name: asdict(score) for name, score in means.items()}
        record = {"items": len(results), "summary": summary, "more": task.summary(results.records)}
        if compared:
            record["first"], differences = compared
            record["minus_first"] = {name: asdict(score) for name, score in differences.items()}
        if groups:
            record["by"] = [
                dict(zip(task.by, values, strict=True)) | {name: asdict(mean) for name, mean in group.items()}
                for values, group in groups.items()
            ]
        typer.echo(json_text({**results.about, **record}))
    else:
        show(task, results, means, groups, compared)
