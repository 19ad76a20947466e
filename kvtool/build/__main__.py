"""Build the patched llama-cpp-python: `python -m kvtool.build`, for make.

Standard library only: make runs it before anything is installed. stdout is the wheel's path; progress goes to
stderr.
"""

from __future__ import annotations

import argparse
import sys

from kvtool.build import needs, sources, wheel
from kvtool.build.flags import asked_cmake_args
from kvtool.errors import KvtoolError, LibraryError


def main(arguments: list[str] | None = None) -> int:
    """Do what the command line says, and return the exit code."""
    what = "Build the patched llama-cpp-python and print the wheel's path."
    parser = argparse.ArgumentParser(prog="python -m kvtool.build", description=what)
    parser.add_argument("--install", action="store_true", help="install the wheel into this environment")
    parser.add_argument("--stock", action="store_true", help="build the same version without the patch")
    asked = parser.parse_args(arguments)
    if asked.install and asked.stock:
        parser.error("--stock builds a library for comparisons; it cannot be installed")
    cmake_args = asked_cmake_args()
    try:
        if asked.install:
            needs.check_environment()
        built = wheel.build(sources.patches_dir(), cmake_args, stock=asked.stock)
        if asked.install:
            wheel.install(built, cmake_args)
    except KvtoolError as error:
        sys.stderr.write(f"kvtool: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"kvtool: cannot write {error.filename}: {error.strerror}\n")
        return LibraryError.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("\nkvtool: stopped; nothing was kept\n")
        return 130
    sys.stdout.write(f"{built}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
