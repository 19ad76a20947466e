"""`kvtool` and `python -m kvtool`: Ctrl-C ends in one line from the first import on."""

from kvtool import interrupt


def main() -> None:
    interrupt.ends()
    from kvtool.cli import main as run

    run()


if __name__ == "__main__":
    main()
