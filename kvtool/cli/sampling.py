"""How tokens are drawn: options of `chat` and `generate`, besides those in flags.py, and their settings."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import utf8
from kvtool.cli.command import DRAWS, SHOWS
from kvtool.cli.texts import read_text
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.engine.loop import Engine
    from kvtool.llama.sampler import Sampler
    from kvtool.llama.sampling import Sampling

_NUMBERS = (
    *("temp", "top_k", "top_p", "min_p", "typical", "xtc_probability", "xtc_threshold"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("mirostat", "mirostat_lr", "mirostat_ent"),
)
_WHOLE = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat")
_LISTS = ("dry_sequence_breaker", "logit_bias", "stop")
_SHAPES = ("grammar", "json_schema")

SAMPLING = (*_NUMBERS, *_LISTS, *_SHAPES)
"""The sampler's options except the seed, by the names of the commands' parameters."""

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "'": "'", "\\": "\\"}


def _option(*names: str, metavar: str, help: str, default: str | bool = True) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, show_default=default, rich_help_panel=DRAWS)


Typical = Annotated[
    float,
    _option("--typical", "--typical-p", metavar="P", help="Locally typical sampling; 1 means off."),
]

XtcProbability = Annotated[
    float,
    _option("--xtc-probability", metavar="P", help="How often XTC drops the likeliest tokens; 0 means off."),
]

XtcThreshold = Annotated[
    float,
    _option(
        "--xtc-threshold",
        metavar="P",
        help="XTC drops all tokens above this probability but the least likely of them; above 0.5: off.",
    ),
]

RepeatLastN = Annotated[
    int,
    _option(
        "--repeat-last-n",
        metavar="N",
        help="Written tokens that the repeat, presence and frequency penalties look back at; 0 means off.",
    ),
]

PresencePenalty = Annotated[
    float,
    _option("--presence-penalty", metavar="X", help="Subtract this from the logit of each recent token."),
]

FrequencyPenalty = Annotated[
    float,
    _option("--frequency-penalty", metavar="X", help="Subtract this for each time a recent token was used."),
]

DryMultiplier = Annotated[
    float,
    _option("--dry-multiplier", metavar="X", help="DRY penalty against repeated sequences; 0 means off."),
]

DryBase = Annotated[
    float, _option("--dry-base", metavar="X", help="Growth of the DRY penalty with each repeated token.")
]

DryAllowedLength = Annotated[
    int, _option("--dry-allowed-length", metavar="N", help="Longest sequence that DRY lets repeat.")
]

DryPenaltyLastN = Annotated[
    int,
    _option("--dry-penalty-last-n", metavar="N", help="Written tokens that DRY looks back at; 0 means off."),
]

DrySequenceBreaker = Annotated[
    list[str] | None,
    _option(
        "--dry-sequence-breaker",
        metavar="TEXT",
        help="A text that no sequence of DRY goes across, in place of the default ones; `none`: there are "
        "none. Repeatable.",
        default=r"\n, :, \" and *",
    ),
]

LogitBias = Annotated[
    list[str] | None,
    _option(
        *("-l", "--logit-bias"),
        metavar="TOKEN+BIAS",
        help="Add to a token's logit, or subtract: 15043+1, 15043-2.5; 15043-inf bans the token. Repeatable.",
    ),
]

Mirostat = Annotated[
    int,
    _option(
        "--mirostat",
        metavar="0|1|2",
        help="Mirostat of version 1 or 2, in place of all other samplers but --temp and --logit-bias; 0 "
        "means off.",
    ),
]

MirostatLr = Annotated[float, _option("--mirostat-lr", metavar="X", help="Mirostat's learning rate, eta.")]

MirostatEnt = Annotated[
    float, _option("--mirostat-ent", metavar="X", help="Mirostat's target entropy in bits, tau.")
]

Grammar = Annotated[
    str | None,
    _option(
        "--grammar",
        metavar="FILE",
        help="Write only what fits this GBNF grammar: a file, or the grammar itself.",
    ),
]

JsonSchema = Annotated[
    str | None,
    _option(
        *("-j", "--json-schema"),
        metavar="FILE|TEXT",
        help="Write only JSON that fits this schema: a file, or the schema itself.",
    ),
]

Stop = Annotated[
    list[str] | None,
    _option(
        "--stop",
        metavar="TEXT",
        help=r"End the text before this one; \n is a line break. Repeatable.",
    ),
]

Logprobs = Annotated[
    int | None,
    typer.Option(
        "--logprobs",
        min=0,
        max=1000,
        metavar="N",
        help="With --json: the log-probability of each token, and the N likeliest, before any sampler "
        "changes them.",
        show_default="off",
        rich_help_panel=SHOWS,
    ),
]


def settings(context: typer.Context) -> Sampling:
    """The settings that the running command's options ask for.

    A grammar's or a schema's file is replaced by its text among the options, so that a session keeps that.
    Call it before a model is loaded. Raises UsageError, and InputError for a file that cannot be read.
    """
    from kvtool.llama.sampling import Sampling

    params = context.params
    its: dict[str, Any] = {name: params[name] for name in _NUMBERS}
    its["stop"] = tuple(text for text in _texts("--stop", params["stop"]) if text)
    if params["dry_sequence_breaker"]:
        breakers = _texts("--dry-sequence-breaker", params["dry_sequence_breaker"])
        its["dry_sequence_breaker"] = tuple(text for text in breakers if text not in ("", "none"))
    its["logit_bias"] = tuple(_bias(text) for text in params["logit_bias"] or [])
    _choose_shape(context)
    params["grammar"] = _text_of("--grammar", params["grammar"], lambda text: "::=" in text)
    params["json_schema"] = _text_of(
        "--json-schema", params["json_schema"], lambda text: text.lstrip().startswith("{")
    )
    # what is wrong with a number needs no library
    made = Sampling(**its)
    if params["json_schema"] is not None:
        its["grammar"] = _schema_grammar(params["json_schema"])
    else:
        its["grammar"] = params["grammar"]
    return Sampling(**its) if its["grammar"] is not None else made


def sampler(context: typer.Context, engine: Engine, its: Sampling) -> Sampler:
    """The sampler of these settings and the running command's seed. Raises UsageError."""
    from kvtool.llama.sampler import Sampler

    return Sampler(engine.model, its, seed=context.params["seed"])


def change(context: typer.Context, sampler: Sampler, name: str, text: str) -> None:
    """Sets one of `SAMPLING`, as its option would, from the next text on; a session keeps it, too.

    name: of a parameter (top_k) or an option (top-k). text: of one that is repeatable the one value, and ""
    for none. Raises UsageError or InputError; then nothing changes.
    """
    name = name.lstrip("-").replace("-", "_")
    if name not in SAMPLING:
        from kvtool.errors import suggestion

        right = ", ".join(SAMPLING)
        raise UsageError(f"there is no setting {name}.{suggestion(name, SAMPLING)} There are: {right}")
    before = dict(context.params)
    context.params[name] = _value(name, text)
    for other in _SHAPES:
        if name in _SHAPES and other != name:
            context.params[other] = None
    try:
        sampler.change(settings(context))
    except BaseException:
        context.params.update(before)
        raise


def _value(name: str, text: str) -> Any:
    if name in _LISTS:
        return [text] if text else None
    if name in _SHAPES:
        return text or None
    kind = int if name in _WHOLE else float
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} must be {what}, got {text!r}") from None


def _texts(flag: str, given: list[str] | None) -> list[str]:
    """The texts of a repeatable option, with escapes resolved as llama.cpp does: others stay as they are."""

    def resolved(found: re.Match[str]) -> str:
        return _ESCAPES.get(found[1], found[0])

    return [re.sub(r"\\(.)", resolved, utf8.option(flag, text) or "") for text in given or []]


def _bias(text: str) -> tuple[int, float]:
    """What -l says: a token, a sign and a number."""
    if found := re.fullmatch(r"\s*(\d+)\s*([+-])\s*(\S+)\s*", text):
        try:
            return int(found[1]), float(found[2] + found[3])
        except ValueError:
            pass
    raise UsageError(f"--logit-bias must be TOKEN+BIAS or TOKEN-BIAS (15043+1), got {utf8.shown(text)!r}")


def _choose_shape(context: typer.Context) -> None:
    """Of --grammar and --json-schema one is left: the one that was typed, before a session's."""
    from kvtool.cli.opening import is_typed

    params = context.params
    if params["grammar"] and params["json_schema"]:
        typed = [name for name in _SHAPES if is_typed(context, name)]
        if len(typed) != 1:
            raise UsageError("--grammar and --json-schema say the same; choose one")
        params.update({name: None for name in _SHAPES if name not in typed})


def _text_of(flag: str, given: str | None, is_text: Any) -> str | None:
    """The text that is given, or that of the file; None for an empty one."""
    if not given:
        return None
    return utf8.option(flag, given) if is_text(given) else read_text(str(Path(given)))


def _schema_grammar(schema: str) -> str:
    from kvtool.llama.grammar import not_held, schema_grammar

    grammar = schema_grammar(schema)
    if names := not_held(schema):
        sys.stderr.write(
            f"a grammar cannot hold the text to the schema's {', '.join(names)}; check the JSON for that\n"
        )
    return grammar
