"""kvtool chat: a chat of any length."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from kvtool.cli.chat.keys import Keys
from kvtool.cli.console import say
from kvtool.cli.declared import ModelName, options
from kvtool.cli.explain import Notice, before_text, may_lose_system, unpinned
from kvtool.cli.model_advice import base_model
from kvtool.cli.output import check_apart, files_read
from kvtool.cli.writing import (
    HideThinking,
    ReplyText,
    end_note,
    is_constrained,
    of_model,
    open_writer,
    with_thinking,
)
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import ChatOptions
from kvtool.config.system import SystemOptions
from kvtool.errors import StreamEnd, UsageError
from kvtool.options import OUTPUT, option
from kvtool.system import interrupt
from kvtool.system.texts import stdin_lines

if TYPE_CHECKING:
    from kvtool.chats.conversation import Conversation
    from kvtool.chats.template import Message
    from kvtool.cli.chat.files import ChatFiles
    from kvtool.config.opening import Opened


@dataclass(frozen=True)
class _ChatOptions(HideThinking):
    plain: bool = option(
        "--plain", False, "Show replies as the model writes them, without colours.", group=OUTPUT
    )
    session: Path | None = option(
        "--session",
        None,
        "Session file: continue the chat in it, and save it after every reply.",
        completes="sessions",
    )
    reread: Path | None = option(
        "--reread FILE",
        None,
        "Start with the text of this session, for example with another model, policy or budget. "
        "The output of kvtool session export --json works too. The file stays as it is.",
        completes="sessions",
    )
    transcript: Path | None = option(
        "--transcript", None, "Append all turns to this file as plain text, also those taken back later."
    )


@options
def chat(
    *,
    model_name: ModelName = None,
    system: SystemOptions,
    generation: GenerationOptions,
    args: _ChatOptions,
    typed_run: ChatOptions,
) -> None:
    """Start a chat of any length, in a cache of a fixed size. Piped stdin: each line is a turn."""
    run = of_model(typed_run, model_name)
    read = [("--system-file", system.system_file), *files_read(run)]
    check_apart(*_written(args), ("--reread", args.reread), read=read)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with ExitStack() as stack:
        starting = stack.enter_context(ExitStack())
        if is_terminal:
            # typed characters would disturb progress bars; the first prompt gets them
            starting.enter_context(Keys().waiting())
        saved = earlier = None
        if args.session:
            from kvtool.chats import session as sessions
            from kvtool.chats.session_meta import resumed

            stack.enter_context(sessions.lock(args.session))
            if (saved := sessions.peek(args.session)) is not None:
                if args.reread:
                    taken = f"{args.session} holds a chat"
                    raise UsageError(f"{taken}; leave out --reread to continue it, or name a new file")
                run, generation = resumed(run, saved), generation.resumed(saved["options"])
        if args.reread:
            from kvtool.chats.session import read_messages

            earlier, its_model = read_messages(args.reread)
            run = run.resumed({"model": its_model}) if its_model else run
        # an earlier chat has its own system prompt, so that of the config file or of a variable is ignored
        is_new = saved is None and earlier is None
        system_prompt = system.text() if is_new or system.typed else None
        if is_terminal:
            # importing this module takes as long as loading a small model, so do both at the same time
            Thread(target=import_module, args=["kvtool.cli.chat.terminal"], daemon=True).start()

        opened, writer = stack.enter_context(open_writer(run, generation))
        engine, run = opened.engine, opened.run

        from kvtool.chats import archive_file
        from kvtool.chats.conversation import Conversation
        from kvtool.chats.prompt import template_of
        from kvtool.cli.chat.files import ChatFiles, open_transcript
        from kvtool.config.report import archive_limit, line, report
        from kvtool.measure.holdings import n_forgotten

        template = template_of(engine.model, run.chat_template)
        conversation = Conversation(writer, template, system_prompt, undoable=is_terminal)
        stack.callback(conversation.close)
        files = stack.enter_context(closing(ChatFiles(conversation, run, generation, args.session)))
        if args.session:
            if saved is not None:
                files.resume(args.session, system_prompt)
            # fail before the first turn: no turn can be saved if another file has the path of the session's
            # archive
            archive_file.check_place(args.session)
        with_thinking(generation, conversation.set_effort)
        conversation.pin_system()
        if args.transcript:
            files.transcript = stack.enter_context(closing(open_transcript(args.transcript)))
        if not (is_terminal or run.explain):
            say(archive_limit(engine))
        if not is_terminal:
            say(base_model(engine.model.path))
        if earlier is not None:
            _reread(conversation, opened, earlier, system_prompt)
            files.keep_session(is_new_turn=True)
            files.check()
        else:
            before_text(engine, run, "turn")
        if may_lose_system(conversation):
            say(unpinned("the system prompt"))
        notice = Notice(engine, "turn", opened.info)

        def before_reading(n: int) -> None:
            notice.noun = _read_next(conversation)
            notice(n)

        writer.before_reading = before_reading
        if is_terminal:
            from kvtool.cli.chat import terminal
            from kvtool.cli.chat.screen import Terminal

            starting.close()
            terminal.run(Terminal(conversation, files, run.policy, notice, args.plain, args.hide_thinking))
        else:
            _pipe(conversation, files, stdin_lines(), notice, args.hide_thinking)
        if run.verbose:
            drafted = f", {writer.n_accepted} of {writer.n_drafted} draft tokens" if writer.drafter else ""
            forgotten = f"{n_forgotten(engine):,} forgotten"
            say(f"{engine.n_past:,} tokens, {forgotten}{drafted}, {line(report(engine, run.policy))}")
    files.check()


def _written(args: _ChatOptions) -> Iterator[tuple[str, Path | None]]:
    """Yield the files that the chat writes, each after the option that names it."""
    if args.session:
        from kvtool.chats.archive_file import archive_path
        from kvtool.chats.session import lock_of

        real = args.session.resolve()
        yield "--session", args.session
        yield "the archive of --session", archive_path(real)
        yield "the lock of --session", lock_of(real)
    yield "--transcript", args.transcript


def _read_next(conversation: Conversation) -> str:
    """Return what a turn that has just begun reads: only the turn, or also the system prompt or the chat."""
    if conversation.writer.engine.n_past:
        return "turn"
    if conversation.n_turn > 1:
        return "chat"
    return "system prompt with the first turn" if conversation.system else "turn"


def _reread(conversation: Conversation, opened: Opened, messages: list[Message], system: str | None) -> None:
    """Read the messages of another chat, and show the progress. Ctrl-C ends the program without saving."""
    from kvtool.cli.progress import line_progress, stopping
    from kvtool.cli.texts import check_length
    from kvtool.serve.tools.conversion import as_text

    writer, engine = conversation.writer, opened.engine
    conversation.reread(as_text(messages), system)
    n = len(writer.unread)
    check_length(engine, n, "chat")
    before_text(engine, opened.run, "chat", n, opened.info)
    with stopping(writer), line_progress("reading") as progress, writer.showing(progress):
        writer.read(writer.unread[:0])
    if writer.stop:
        raise KeyboardInterrupt


def _pipe(
    conversation: Conversation, files: ChatFiles, lines: Iterator[str], notice: Notice, hides: bool
) -> None:
    """Read each line as a turn. Write the replies, and nothing else, to stdout.

    hides: True to leave the thoughts out.
    """
    writer, generation = conversation.writer, files.generation
    for line in lines:
        if not line.strip():
            continue
        interrupt.stops(writer)
        writer.ends_loops = generation.stop_loops == "on"
        with interrupt.terminating(writer):
            reply = _write_reply(conversation, files, line, hides or is_constrained(generation))
            files.check()
            sys.stdout.write("\n")
            sys.stdout.flush()
        if writer.stop:
            raise KeyboardInterrupt
        is_empty = not reply.answer.strip()
        say(
            notice.after(),
            end_note(writer, generation, "reply", is_empty=is_empty, thought=bool(reply.thought)),
        )
        # until the next turn, Ctrl-C ends the program at once
        interrupt.ends()


def _write_reply(conversation: Conversation, files: ChatFiles, line: str, hides: bool) -> ReplyText:
    """Write the reply to a turn, save the turn with its reply, and return the reply.

    If stdout is a pipe without a reader, the chat is still saved. After that, OSError is raised.
    """
    reply = ReplyText()
    try:
        if conversation.read_turn(line):
            splitter, opening = conversation.splitter(), conversation.opening
            reply = ReplyText(splitter, opening, hides=hides)
            with closing(conversation.answer(files.generation.n)) as pieces:
                for text in reply.texts(pieces):
                    sys.stdout.write(text)
                    sys.stdout.flush()
    except OSError:
        files.keep()
        raise
    except StreamEnd as error:
        raise StreamEnd(files.advice(error)) from None
    files.keep()
    say(files.moved_line())
    return reply
