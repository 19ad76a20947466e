"""Repeat the papers' experiments, and write their tables: python -m lab.papers."""

from __future__ import annotations

import os
import sys

from kvtool.system import interrupt
from lab.papers.runner import main

if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        sys.exit(interrupt.EXIT_CODE)
    except BrokenPipeError:
        # a closed pipe is no error, for example in `plan | head`: the rest of the output is dropped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
