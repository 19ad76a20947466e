"""Draw docs/chat.svg: a real chat about a long document, in a terminal.

    python docs/make_chat.py

This needs tmux and takes minutes, because the model reads docs/cli.md. At the first call, the model (1 GiB)
is downloaded.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).with_name("chat.svg")
ROOT = TARGET.parents[1]
KVTOOL = Path(sys.executable).with_name("kvtool")
SERVER = "kvtool-picture"
COMMAND = "kvtool chat -m qwen2.5-coder-1.5b"
QUESTIONS = (
    "@docs/cli.md Which option keeps a chat in a file?",
    "And which one lets the archive take 2 GiB at most? Give an example.",
)
WIDTH, HEIGHT = 100, 32
SETTINGS = {"KVTOOL_TEMP": "0", "OMP_NUM_THREADS": "1", "PS1": "$ "}
"""Temperature 0 takes the likeliest tokens, so that the picture can be reproduced."""


def main() -> None:
    if not shutil.which("tmux"):
        sys.exit("tmux is missing; install it (Debian, Ubuntu: sudo apt install tmux)")
    with tempfile.TemporaryDirectory() as state:
        draw(typed(state))


def typed(state: str) -> str:
    """Type the questions, wait for the answers, and return the screen with its colours.

    state: an empty folder, in which kvtool writes the history of the input.
    """
    own = SETTINGS | {"PATH": f"{KVTOOL.parent}:{os.environ['PATH']}", "XDG_STATE_HOME": state}
    # set the variables with `env`: if `tmux -e` set them, the shell that tmux starts would change some of
    # them
    shell = shlex.join(["env", *(f"{name}={value}" for name, value in own.items()), "bash", "--norc"])
    size = ("-x", str(WIDTH), "-y", str(HEIGHT))
    tmux("-f", os.devnull, "new-session", "-d", *size, "-c", str(ROOT), shell)
    try:
        tmux("set-option", "status", "off")
        tmux("resize-window", *size)
        wait("$")
        for line in (COMMAND, *QUESTIONS):
            tmux("send-keys", line, "Enter")
            wait(">")
        return tmux("capture-pane", "-e", "-p")
    finally:
        tmux("kill-server")


def wait(prompt: str) -> None:
    """Wait until the last line of the screen is `prompt` and the screen has not changed for two seconds."""
    same, before = 0, ""
    while same < 4:
        time.sleep(0.5)
        screen = tmux("capture-pane", "-p")
        last = screen.rstrip().rpartition("\n")[2]
        same = same + 1 if screen == before and last == prompt else 0
        before = screen


def draw(screen: str) -> None:
    """Write the picture of a screen, without addresses of fonts, so that the picture loads nothing."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, color_system="truecolor")
        # print all lines as one text, because a style can extend over several lines
        console.print(Text.from_ansi(screen.rstrip("\n")), soft_wrap=True)
        svg = console.export_svg(title="kvtool chat", unique_id="kvtool")
    TARGET.write_text(re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.S), encoding="utf-8")


def tmux(*arguments: str) -> str:
    command = ["tmux", "-L", SERVER, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
