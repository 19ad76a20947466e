"""Draw docs/chat.svg: a real chat in an 80x24 terminal, after so many turns that its start was evicted.

    python docs/make_chat.py

It needs tmux, and takes some minutes: first the earlier turns are said through a pipe, then the last ones are
typed into a terminal of tmux, whose screen is drawn.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

TARGET = Path(__file__).with_name("chat.svg")
KVTOOL = Path(sys.executable).with_name("kvtool")
SESSION = "kvtool-picture"
COMMAND = "kvtool chat --session talk.kv -t 1"
OPTIONS = "--budget 512 --seed 3 --temp 0.6 --repeat-penalty 1.1 -n 250"
WIDTH, HEIGHT = 80, 24

TOPICS = (
    *("the sea", "the moon", "volcanoes", "whales", "rivers", "clouds", "the desert", "bees", "glaciers"),
    *("lighthouses", "maps", "clocks", "bridges", "windmills", "the telescope", "printing", "tea", "bread"),
    *("salt", "silk", "glass", "paper", "iron", "gold", "horses", "cats", "owls", "wolves", "salmon", "oaks"),
    *("roses", "wheat", "potatoes", "chess", "the violin", "the theatre", "painting", "poetry", "cinema"),
    *("stars", "trains", "Rome", "ice cream", "dinosaurs", "the guitar", "chocolate", "the Nile", "penguins"),
    *("coffee", "sailing", "castles", "dragons", "the rainbow", "the harp", "snow", "the sun", "Egypt"),
)
QUESTIONS = ("What is a tide? One sentence, please.", "And what causes it?")


def main() -> None:
    if not shutil.which("tmux"):
        sys.exit("tmux is missing; install it (Debian, Ubuntu: sudo apt install tmux)")
    with tempfile.TemporaryDirectory() as folder:
        turns = "".join(f"Tell me about {topic}.\n" for topic in TOPICS)
        said = f"{KVTOOL} {COMMAND.removeprefix('kvtool')} {OPTIONS}".split()
        subprocess.run(said, input=turns, text=True, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        draw(typed(folder))


def typed(folder: str) -> str:
    """The screen, colours included, after the questions were typed and answered."""
    shell = f"env PS1='$ ' PATH={KVTOOL.parent}:{os.environ['PATH']} OMP_NUM_THREADS=1 bash --norc"
    tmux("new-session", "-d", "-s", SESSION, "-x", str(WIDTH), "-y", str(HEIGHT), "-c", folder, shell)
    try:
        tmux("set-option", "-t", SESSION, "status", "off")
        tmux("resize-window", "-t", SESSION, "-x", str(WIDTH), "-y", str(HEIGHT))
        wait("$")
        for line in (COMMAND, *QUESTIONS):
            tmux("send-keys", "-t", SESSION, line, "Enter")
            wait(">")
        return tmux("capture-pane", "-e", "-p", "-t", SESSION)
    finally:
        tmux("kill-session", "-t", SESSION)


def wait(prompt: str) -> None:
    """Until the last line is this prompt, and stays so for two seconds."""
    same, before = 0, ""
    while same < 4:
        time.sleep(0.5)
        screen = tmux("capture-pane", "-p", "-t", SESSION)
        last = screen.rstrip().rpartition("\n")[2]
        same = same + 1 if screen == before and last == prompt else 0
        before = screen


def draw(screen: str) -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, color_system="truecolor")
        for line in screen.rstrip("\n").split("\n"):
            console.print(Text.from_ansi(line), soft_wrap=True)
        console.save_svg(str(TARGET), title="kvtool chat", unique_id="kvtool")


def tmux(*arguments: str) -> str:
    return subprocess.run(["tmux", *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
