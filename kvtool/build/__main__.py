"""Build the patched llama.cpp: `python -m kvtool.build`, for make.

It imports only the standard library, because make runs it before anything is installed. It prints the wheel's
path to stdout, and the progress to stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvtool.build import dist, needs, sources, wheel
from kvtool.build.flags import asked_cmake_args
from kvtool.errors import KvtoolError, LibraryError


def main(arguments: list[str] | None = None) -> int:
    what = "Find or build the patched llama.cpp and print the wheel's path."
    parser = argparse.ArgumentParser(prog="python -m kvtool.build", description=what)
    parser.add_argument("--install", action="store_true", help="install the wheel into this environment")
    parser.add_argument("--stock", action="store_true", help="build the same version without the patch")
    parser.add_argument("--dist", metavar="FOLDER", help="write the wheel for every CPU there, to give away")
    chosen = parser.parse_args(arguments)
    if chosen.stock and (chosen.install or chosen.dist):
        parser.error("--stock builds a library for comparisons; it cannot be installed")
    if chosen.install and chosen.dist:
        parser.error("--install and --dist exclude each other")
    try:
        cmake_args = asked_cmake_args()
        if chosen.install:
            needs.check_environment()
        folder = sources.patches_dir()
        if chosen.dist:
            built = dist.write(folder, Path(chosen.dist))
        elif chosen.stock:
            built = wheel.build(folder, cmake_args, stock=True)
        else:
            built = wheel.find_or_build(folder, cmake_args)
        if chosen.install:
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
