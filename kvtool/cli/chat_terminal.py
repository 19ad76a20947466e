"""The chat that a person sees in a terminal: reads what they type until they leave."""

from __future__ import annotations

from kvtool.cli.chat_commands import Commands
from kvtool.cli.chat_input import Prompt, unquoted
from kvtool.cli.chat_screen import Terminal
from kvtool.cli.first_chat import better_model
from kvtool.cli.keeper import turns
from kvtool.system import interrupt
from kvtool.system.texts import shown

_KEPT = "the last turn stays as it was"


def run(terminal: Terminal) -> None:
    """Each text is a command or a turn."""
    from rich.text import Text

    engine, commands = terminal.engine, Commands(terminal)
    model, policy = (engine.model.path.stem, "bold"), (terminal.policy, "bold")
    rest = f", {engine.policy.budget:,} cells, /help for help"
    terminal.console.print(Text.assemble(model, " with policy ", policy, rest))
    if n := terminal.conversation.n_turn:
        terminal.note(f"continuing after {turns(n)}, {engine.n_past:,} tokens")
        terminal.show_last()
    elif terminal.keeper.path:
        terminal.note(f"a new chat, to be kept in {terminal.keeper.path}")
    if terminal.keeper.run.model is None and (better := better_model()):
        terminal.note(better)
    prompt = Prompt(commands.words())
    while (typed := _ask(terminal, prompt)) is not None:
        with terminal.keys.waiting():
            text = unquoted(typed)
            is_command = text.startswith("/") and not text.startswith("//")
            again, terminal.edits = terminal.edits, False
            if again and (is_command or not text):
                terminal.note(_KEPT)
            if is_command:
                if not commands.run(text):
                    break
            elif text:
                # of two slashes at the start of a turn the first is no part of it
                # what a terminal without UTF-8 sends must not end the chat
                terminal.say(shown(text[1:] if text.startswith("//") else text), again=again)


def _ask(terminal: Terminal, prompt: Prompt) -> str | None:
    """What the user types next; None to leave."""
    interrupt.raises()
    default, terminal.typed = terminal.typed, ""
    while True:
        try:
            return str(prompt.ask(default))
        except EOFError:
            return None
        except KeyboardInterrupt:
            default = ""
            terminal.note(_KEPT if terminal.edits else "Ctrl-D or /exit leaves")
            terminal.edits = False
