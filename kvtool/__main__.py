"""`kvtool` and `python -m kvtool`: Ctrl-C is quiet from the first import on."""

import sys


def main() -> None:
    try:
        from kvtool.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
