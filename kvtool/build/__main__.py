"""`python -m kvtool.build`: builds llama.cpp for make, before anything is installed."""

import sys

from kvtool.build.wheel import main

if __name__ == "__main__":
    sys.exit(main())
