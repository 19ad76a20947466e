"""The commands that there are."""

COMMANDS = {
    "chat": ("chat", "Start a chat: memory and speed stay constant however long it gets."),
    "generate": ("generate", "Answer a prompt, a text on stdin, or both."),
    "serve": ("serve", "Answer programs that speak the OpenAI API, from caches that never fill."),
    "perplexity": (
        "perplexity",
        "Stream a text through the cache and print its perplexity; lower is better.",
    ),
    "compare": ("compare", "Stream a text under each policy and budget, and compare the results."),
    "eval": ("evaluate", "Ask a task's questions under a policy, and score the answers."),
    "inspect": (
        "inspect",
        "Stream a text through the cache and show which of its tokens the rows still hold.",
    ),
    "policies": ("policies", "List the policies with their parameters, defaults and papers."),
    "models": ("app", "List, download, inspect and delete models."),
    "session": ("app", "Look into session files."),
    "config": ("config", "Show which defaults are set, and where: in the file or the environment."),
    "worker": (
        "worker",
        "Lend this machine's GPUs, or its CPU, to another machine that runs kvtool with --rpc.",
    ),
    "build": ("build", "Build the patched llama.cpp and install it beside kvtool."),
    "doctor": (
        "doctor",
        "Check the installation: what is built and cached, what is wrong, and how to fix it.",
    ),
    "help": ("help_", "Show the help of a command."),
}
"""The module in this folder; the name in it, of a function or a Typer app of several commands; a sentence.

The sentence is here because importing all commands takes as long as loading a small model.
"""
