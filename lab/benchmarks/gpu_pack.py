"""Pack the files that gpu_check.py needs on a machine without a network, a compiler and models.

    python -m lab.benchmarks.gpu_pack build/gpu-check kvtool_llama-*.whl --tests tests/engine/test_recall.py

The folder then contains: the library without its symbols, the Python packages that are missing on such a
machine, the kernels for any x86-64 CPU with AVX2, the tokenizer of kvtool's default model, and a library that
the tests preload.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import gguf

from kvtool.build import kernels, sources
from kvtool.models.resolve import resolve
from lab.benchmarks.common import note
from lab.benchmarks.gpu_check import kernel_digest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = "3.12"
"""Version of Python on the machine with the GPU."""

PACKAGES = (
    *(
        "gguf",
        "prompt_toolkit",
        "wcwidth",
        "platformdirs",
        "typer",
        "click",
        "shellingham",
        "rich",
        "filelock",
    ),
    *("markdown-it-py", "mdurl", "pygments", "jinja2", "typing_extensions", "packaging"),
    *("pytest", "pluggy", "iniconfig", "pytest-xdist", "execnet"),
)
"""Packages to pack, in the versions that are installed here. NumPy is installed on the other machine."""

TIMEOUT = "pytest-timeout==2.4.0"

CPU = "x86-64-v3"
"""LLVM's name for the oldest CPU on which the kernels must run."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheel", type=Path, help="kvtool-llama, built for the GPU")
    parser.add_argument(
        "--tests", nargs="*", default=[], help="arguments of pytest that name the tests to run"
    )
    args, others = parser.parse_known_args()
    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_file():
            old.unlink()
    note("packing the library")
    pack_library(args.wheel, folder / "library.tar.xz")
    note("fetching Python packages")
    fetch_packages(folder)
    note("compiling the kernels")
    compile_kernels(folder / "kernels.so")
    write_vocabulary(resolve(), folder / "vocab.gguf")
    command = [os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-o", str(folder / "cuda_f32.so")]
    subprocess.run([*command, str(ROOT / "tests" / "tools" / "cuda_f32.c")], check=True)
    about = {
        "wheel": args.wheel.name,
        "patch": sources.patch_digest(sources.patches_dir()),
        "kernels": kernel_digest(),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "tests": [*args.tests, *others],
    }
    (folder / "manifest.json").write_text(json.dumps(about, indent=1) + "\n")
    sizes = {path.name: path.stat().st_size / 2**20 for path in folder.iterdir() if path.is_file()}
    note(f"{folder}: {sum(sizes.values()):.1f} MiB, of these the library {sizes['library.tar.xz']:.1f}")


def pack_library(wheel: Path, target: Path) -> None:
    """Write a wheel's files as a .tar.xz archive, with symbols stripped from the libraries."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
        for library in folder.rglob("*.so*"):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 << 20}]
        with (
            lzma.open(target, "wb", filters=filters) as compressed,
            tarfile.open(fileobj=compressed, mode="w") as packed,
        ):
            for path in sorted(folder.iterdir()):
                packed.add(path, path.name)


def fetch_packages(folder: Path) -> None:
    """Download a wheel of each package, for the Python of the machine with the GPU."""
    from importlib.metadata import version

    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for platform in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        command += ["--platform", platform]
    command += ["-d", str(folder), *(f"{name}=={version(name)}" for name in PACKAGES), TIMEOUT]
    subprocess.run(command, check=True)


def compile_kernels(target: Path) -> None:
    """Write the kernels' library for any x86-64 CPU with AVX2."""
    import llvmlite.binding as llvm

    from kvtool.kernels.kernel import of_module
    from kvtool.kernels.link import link

    # numba and the linker ask for this machine's CPU: answer with the CPU for which the kernels are compiled
    os.environ["NUMBA_CPU_NAME"], os.environ["NUMBA_CPU_FEATURES"] = CPU, ""
    llvm.get_host_cpu_name = lambda: CPU
    llvm.get_host_cpu_features = lambda: llvm.FeatureMap()
    from importlib import import_module

    by_name = {kernel.name: kernel for name in kernels.modules() for kernel in of_module(import_module(name))}
    for kernel in by_name.values():
        kernel.compile()
    link(by_name.values(), target.resolve())


def write_vocabulary(model: Path, target: Path) -> None:
    """Write a model's header and tokenizer, without its weights."""
    reader = gguf.GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for key, field in reader.fields.items():
        # leave out the fields that the writer adds, and the alignment, which matters only for tensors
        if key.startswith("GGUF.") or key in ("general.architecture", "general.alignment"):
            continue
        if field.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(key, field.contents(), field.types[0])
        elif len(field.data):  # the writer cannot write an empty array
            writer.add_key_value(key, field.contents(), gguf.GGUFValueType.ARRAY, field.types[-1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    main()
