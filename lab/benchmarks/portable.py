"""Compare the CPU time of `kvtool perplexity` with two builds of its library.

One build is the wheel that runs on every CPU. The other build was compiled for this machine.

    python -m lab.benchmarks.portable wiki.test.raw --wheel dist/kvtool_llama-*.whl --policy h2o --budget 256

Both builds read the same text in new processes. The processes run in pairs, and the order within a pair
alternates. The time is the time of the whole process. The first pair is not counted, because it fills caches.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from kvtool.build.pack import PACKAGE
from lab.benchmarks.common import add_common, describe, machine, make_parser, note, show, spread, write_json


def main() -> None:
    parser = make_parser(__doc__)
    add_common(parser)
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--budget", default="256")
    parser.add_argument("--tokens", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "kvtool",
        "perplexity",
        str(args.file),
        "-t",
        str(args.threads),
        "--json",
    ]
    command += ["--policy", args.policy, "--budget", args.budget, "--max-tokens", str(args.tokens)]
    command += ["-m", args.model] if args.model else []
    ratios, scores = [], {}
    with tempfile.TemporaryDirectory() as site:
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", site, str(args.wheel)]
        subprocess.run(pip, check=True)
        assert (Path(site) / PACKAGE).is_dir(), f"{args.wheel} has no {PACKAGE}"
        sides = {"own": {}, "portable": {"PYTHONPATH": site}}
        for i in range(args.rounds + 1):
            taken = {}
            for name in sides if i % 2 else reversed(sides):
                taken[name], scores[name] = run(command, sides[name])
            if i > 0:
                ratios.append(taken["portable"] / taken["own"])
            note(f"round {i} of {args.rounds}: {describe(taken)}")
    results = {"machine": machine(), "cpu_time_over_own": spread(ratios), "nll": scores}
    print(f"CPU time over this machine's own build: {show(spread(ratios))}; mean NLL {describe(scores)}")
    print(describe(results["machine"]))
    write_json(args.json, results)


def run(command: list[str], more: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of CPU time that a process takes, and the score that it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr)
    seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, json.loads(done.stdout)["nll"]


if __name__ == "__main__":
    main()
