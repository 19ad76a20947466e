"""Advice for command lines with names from other programs, misspelt names, or prompts without quotes.

click alone is not enough. It suggests names that are similar, but not names that mean the same. It also reads
an unknown name with one dash as several options. For example, it reads `-hf` as `-h -f`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

_OTHER_NAMES = {
    "chat": ("run", "start", "cli"),
    "generate": ("prompt", "complete"),
    "serve": ("server", "api"),
    "models list": ("list", "ls"),
    "models pull": ("pull", "download", "get"),
    "models show": ("show", "info"),
    "models rm": ("rm", "remove", "delete"),
    "bench": ("benchmark", "llama-bench"),
    "perplexity": ("ppl",),
    "session show": ("sessions",),
    "session export": ("export",),
    "eval": ("tasks",),
    "worker": ("rpc-server",),
    "config": ("settings",),
    "doctor": ("check",),
    "--version": ("version",),
}
"""Names that other programs use for our commands."""

INSTEAD = {
    "kvtool": {name: ours for ours, names in _OTHER_NAMES.items() for name in names},
    "kvtool models": {
        **{"ls": "models list", "download": "models pull", "get": "models pull"},
        **{"info": "models show", "remove": "models rm", "delete": "models rm"},
    },
    "kvtool session": {"cat": "session export", "print": "session export", "info": "session show"},
}
"""For each group of commands, a map from the names in other programs to our commands."""

NOT_HERE = {
    "ps": "kvtool runs nothing in the background: a command loads its model, and frees it when it ends",
    "stop": "kvtool runs nothing in the background; press Ctrl-C to stop a command",
    "quantize": "kvtool does not change GGUF files; llama.cpp's llama-quantize makes smaller ones",
    "convert": "kvtool does not make GGUF files; llama.cpp's convert_hf_to_gguf.py does",
}
"""Commands of other programs that kvtool does not have, and why it does not have them."""

OURS = {
    "--api-key-file": ("--api-key",),
    "--batch-size": ("-ub", "--ubatch-size", "--n-batch", "--num-batch"),
    "--budget": ("--max-kv-size",),
    "--cache-type-k": ("--type-k", "--ctk", "--kv-cache-type", "--kv-cache-dtype"),
    "--cache-type-v": ("--type-v", "--ctv"),
    "--ctx-size": (
        *("--ctx", "--n-ctx", "--num-ctx", "--context", "--context-size", "--context-length"),
        *("--max-context", "--max-model-len"),
    ),
    "--draft": ("-md", "--model-draft", "--draft-model"),
    "--gpu-layers": ("--ngl", "--n-gpu-layers", "--num-gpu", "--num-gpu-layers"),
    "--grammar": ("--grammar-file",),
    "--hide-thinking": ("--hidethinking",),
    "--host": ("--listen",),
    "--json-schema": ("-jf", "--json-schema-file", "--format"),
    "--lora": ("--lora-scaled",),
    "--logprobs": ("--n-probs", "--top-logprobs"),
    "--parallel": ("-np", "--n-parallel", "--max-num-seqs"),
    "--plain": ("--nowordwrap",),
    "--predict": ("--max-tokens", "--max-new-tokens", "--max-length", "--num-predict"),
    "--raw": ("-no-cnv", "--no-conversation"),
    "--repeat-penalty": ("--repetition-penalty",),
    "--seed": ("-s",),
    "--session": ("--prompt-cache", "--prompt-cache-file"),
    "--sessions": ("--slot-save-path",),
    "--stop": ("-r", "--reverse-prompt"),
    "--system": ("-sys", "--system-prompt"),
    "--system-file": ("-sysf", "--system-prompt-file"),
    "--temp": ("--temperature",),
    "--threads": ("-tb", "--threads-batch", "--n-threads", "--num-thread", "--num-threads"),
    "--windows": ("--ppl-window",),
}
"""Names that llama.cpp, Ollama, vLLM, mlx-lm and transformers use for our options."""

ADVICE = {
    "use -m hf:{value}": ("-hf", "-hfr", "--hf-repo"),
    "use -m hf:OWNER/REPO:{value}": ("-hff", "--hf-file"),
    "use -m {value}": ("-mu", "--model-url"),
    "put the token into $HF_TOKEN": ("-hft", "--hf-token"),
    "`kvtool chat` is a conversation, without this option": (
        *("-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first"),
        *("-ins", "--instruct"),
    ),
    "`kvtool generate` answers a prompt": (
        *("-p", "--prompt", "-st", "--single-turn", "-no-cnv", "--no-conversation"),
    ),
    "kvtool always runs chat templates with Jinja; leave it out": ("--jinja", "--no-jinja"),
    "this command uses no chat template; leave it out": ("--chat-template", "--chat-template-file"),
    "models are mapped into memory, and not locked there; leave it out": (
        *("--mlock", "--mmap", "--no-mmap", "--use-mmap", "--use-mlock"),
    ),
    "sinks and the system prompt always stay; leave it out": ("--keep", "--n-keep", "--num-keep"),
    "the eviction policy (--policy) makes room in a full cache; leave it out": (
        *("--context-shift", "--no-context-shift"),
    ),
    "positions beyond the trained context are made by --positions; leave it out": (
        *("--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale", "--yarn-orig-ctx"),
        *("-gan", "--grp-attn-n", "-gaw", "--grp-attn-w"),
    ),
    "layers are spread over all GPUs; $CUDA_VISIBLE_DEVICES chooses among them": (
        *("-dev", "--device", "--tensor-parallel-size"),
    ),
    "kvtool takes neither images nor control vectors; leave it out": (
        *("--mmproj", "-mm", "--image", "--control-vector"),
    ),
    "kvtool needs no such option; leave it out": (
        *("-co", "--color", "-e", "--escape", "--simple-io", "--no-display-prompt", "--no-warmup"),
        *("--log-disable", "--no-perf", "--keepalive", "--keep-alive", "--gpu-memory-utilization"),
    ),
}
"""Maps advice to the options of other programs to which it applies.

A command gives the advice if it does not have the option.
"""

_OURS = {name: ours for ours, names in OURS.items() for name in names}
_ADVICE = {name: advice for advice, names in ADVICE.items() for name in names}


def no_command(path: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a word that is not a command.

    path: the group of commands, such as "kvtool models". known: the commands of this group.
    """
    group = "" if path == "kvtool" else f"`{path}`: "
    line = f"{group}there is no command {name!r}"
    if instead := INSTEAD.get(path, {}).get(name):
        return f"{line}; use `kvtool {instead}`"
    if not group and name in NOT_HERE:
        return f"{line}; {NOT_HERE[name]}"
    if not group and name.endswith(".gguf"):
        from shlex import quote

        return f"{line}; use `kvtool chat {quote(name)}`"
    if not group and " " in name:
        return f"name a command first: `kvtool generate {quoted(name)}` or `kvtool chat`"
    # imported here and not above, because every command imports this file
    from difflib import get_close_matches

    if similar := get_close_matches(name, list(known), n=1):
        return f"{line}; did you mean `{path} {similar[0]}`?"
    return f"{line}; `{path} -h` lists them"


def ours(name: str) -> str:
    """Return kvtool's flag for an option.

    name: the option's name in kvtool or in another program, with or without dashes.
    """
    name = name.lstrip("-").replace("_", "-")
    flag = f"--{name}" if len(name) > 1 else f"-{name}"
    return _OURS.get(flag, flag)


def other_option(context: Any, args: Sequence[str]) -> str | None:
    """Return the message for the first option of another program, or None if there is no such option.

    args: the arguments as they were typed. Values of our own options are not examined.
    """
    options = [p for p in context.command.get_params(context) if p.param_type_name == "option"]
    known = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
    words = iter(args)
    for word in words:
        name, has_value, value = word.partition("=")
        if word == "--":
            break
        if name in known:
            if not (has_value or known[name].is_flag or known[name].count):
                next(words, None)
        elif name in _OURS and _OURS[name] in known:
            return f"no such option: {name}; use {_OURS[name]}"
        elif name in _ADVICE:
            advice = _ADVICE[name].format(value=value if has_value else next(words, "..."))
            return f"no such option: {name}; {advice}"
        elif name in _OURS:
            # do not leave this to click, which would read `-md 9` as `-m d` with an argument 9
            return f"no such option: {name}; `{context.command_path} -h` lists its options"
    return None


def dash_advice(name: str, command: Any) -> str:
    """Return advice if an unknown option is the start of an argument such as "-5 + 3 = ?", else "".

    name: the unknown option. command: the command that refused it.
    """
    takes_text = any(param.param_type_name == "argument" for param in command.params)
    if not (takes_text and name[1:2].isdigit()):
        return ""
    if command.name == "generate":
        return "; if a text begins with -, put -- before it, or use -p"
    return "; if a name begins with -, put -- before it"


def too_many(context: Any, surplus: Sequence[str]) -> str:
    """Return the message for arguments that a command does not take. surplus: these arguments."""
    from shlex import quote

    path, command = context.command_path, context.command
    if command.name == "generate":
        prompt = " ".join([context.params["argument"], *surplus])
        return f"put the prompt into quotes: `{path} {quoted(prompt)}`"
    if command.name in ("chat", "serve"):
        return not_a_model(" ".join([context.params["model_name"], *surplus]))
    names = [param.metavar for param in command.params if param.param_type_name == "argument"]
    takes = f"takes only {' '.join(names)}" if names else "takes only options"
    return f"`{path}` {takes}; leave out {' '.join(map(quote, surplus))}"


def not_a_model(text: str) -> str:
    """Return the message for a prompt that was typed where a model was expected."""
    return (
        f"{text!r} is not a model; `kvtool generate {quoted(text)}` answers a prompt, and `kvtool chat` "
        "starts a chat in which you type it"
    )


def quoted(text: str) -> str:
    """Quote a text for a shell. Use double quotes, unless the shell would change the text inside them."""
    from shlex import quote

    return quote(text) if set(text) & set('"$`\\!') else f'"{text}"'
