"""The loop of a chat in a terminal: ask for a command or a turn, and run it."""

from __future__ import annotations

from prompt_toolkit.utils import is_dumb_terminal

from kvtool.cli.chat.files import turns
from kvtool.cli.chat.input import Prompt, meant
from kvtool.cli.chat.screen import Terminal
from kvtool.cli.chat.slash_commands import OF_NAME, Commands
from kvtool.cli.model_advice import base_model, better_model
from kvtool.system import interrupt
from kvtool.system.texts import shown

_KEPT = "the last turn is unchanged"


def run(terminal: Terminal) -> None:
    """Run commands and turns until the user leaves."""
    from rich.text import Text

    from kvtool.config.report import archive_limit

    engine, commands = terminal.engine, Commands(terminal)
    model, policy = (engine.model.path.stem, "bold"), (terminal.policy, "bold")
    rest = f", a cache of {engine.policy.budget:,} tokens; trained for {engine.model.n_ctx_train:,} tokens"
    terminal.console.print(Text.assemble(model, " with policy ", policy, rest))
    if not terminal.files.run.explain and engine.policy.evicts:
        terminal.note(archive_limit(engine) or "text that leaves the cache is forgotten")
    if base := base_model(engine.model.path):
        terminal.note(base)
    terminal.note("/help shows help, Ctrl-D leaves")
    if n := terminal.conversation.n_turn:
        saved = f", saved in {terminal.files.path}" if terminal.files.path else ""
        terminal.note(f"continuing after {turns(n)}, {engine.n_past:,} tokens{saved}")
        terminal.show_last()
    elif terminal.files.path:
        terminal.note(f"a new chat, saved in {terminal.files.path}")
    if terminal.files.run.model is None and (better := better_model()):
        terminal.note(better)
    prompt = Prompt({name: command.words for name, command in OF_NAME.items()})
    while True:
        if (typed := _ask(terminal, prompt)) is None:
            if terminal.may_leave():
                break
            continue
        with terminal.keys.waiting():
            text, is_command = meant(typed)
            again, terminal.edits = terminal.edits, False
            if again and (is_command or not text):
                terminal.note(_KEPT)
            if is_command:
                if not commands.run(text) and terminal.may_leave():
                    break
            elif text:
                # a terminal without UTF-8 may send invalid bytes
                terminal.say(shown(text), again=again)


def _ask(terminal: Terminal, prompt: Prompt) -> str | None:
    """Return the next text that the user types, or None if the user leaves."""
    # the prompt handles Ctrl-C itself; while there is no prompt, another Ctrl-C must not end the chat
    interrupt.ignores()
    default, terminal.typed = terminal.typed, ""
    # if the prompt appears with a default text, drop the characters that the user typed before: otherwise
    # they would be appended to the default text
    if default and prompt.forget():
        terminal.note("the text that you typed ahead was dropped")
    if default and is_dumb_terminal():
        # such a terminal would not show a text at the prompt, and would send it with the typed text
        terminal.note(f"type it again, with your changes:\n{default}")
        default = ""
    while True:
        try:
            return prompt.ask(default)
        except EOFError:
            return None
        except KeyboardInterrupt:
            default = ""
            terminal.note(_KEPT if terminal.edits else "Ctrl-D or /exit leaves")
            terminal.edits = False
