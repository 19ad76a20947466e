"""Check that a patched library with nothing enabled gives the logits of an unpatched one, bit by bit.

    python tests/tools/compare_stock.py STOCK_SITE_DIR [--archs DIR]

STOCK_SITE_DIR has an unpatched kvtool_llama package: pip install --target STOCK_SITE_DIR WHEEL. This Python
imports the patched package. Each library runs in its own process. DIR has further models, for example the
models of `make check-archs`. Models that kvtool refuses are skipped. The program prints a line per case. The
exit status is 1 if a case differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

N_TOKENS = 64
N_CELL = 256
MODELS = ("tiny", "gemma3", "smollm2")
BATCHES = (1, 32)
# (flash attention, type of K, type of V). FLASH and TYPES map these names to ggml's numbers
CACHES = (("off", "f16", "f16"), ("on", "f16", "f16"), ("off", "q8_0", "f16"), ("on", "q8_0", "q8_0"))
FLASH = {"off": 0, "on": 1}
TYPES = {"f16": 1, "q8_0": 8}


def cases(paths):
    """Yield the cases: (index of a model's path, flash attention, type of K, type of V, batch size).

    The models in MODELS run with all caches and batch sizes. The remaining models run once.
    """
    for model, cache, batch in product(range(len(MODELS)), CACHES, BATCHES):
        yield model, *cache, batch
    for model in range(len(MODELS), len(paths)):
        yield model, *CACHES[0], BATCHES[-1]


def work(out, *paths):
    """Write the logits of every case to the folder `out`.

    They are from the llama.cpp that this process imports.
    """
    # not through kvtool.llama, which refuses an unpatched library
    from kvtool_llama import llama_cpp as api

    (out / "library").write_text(f"{api._lib._name}\n{hasattr(api._lib, 'llama_kvtool_abi')}")
    api.llama_backend_init()
    i_model, loaded = -1, None
    for number, (model, *case) in enumerate(cases(paths)):
        if model != i_model:
            api.llama_model_free(loaded)
            params = api.llama_model_default_params()
            i_model, loaded = model, api.llama_model_load_from_file(os.fsencode(paths[model]), params)
        np.save(out / f"{number}.npy", logits(api, loaded, *case))


def logits(api, model, flash, type_k, type_v, n_batch):
    """Return the logits f32[n, n_vocab] of N_TOKENS random tokens. A batch has n_batch tokens."""
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    tokens = np.random.default_rng(0).integers(3, n_vocab, N_TOKENS).tolist()
    params = api.llama_context_default_params()
    params.n_ctx = N_CELL
    params.n_batch = params.n_ubatch = n_batch
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = FLASH[flash]
    params.type_k, params.type_v = TYPES[type_k], TYPES[type_v]
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_init(n_batch, 0, 1)
    parts = []
    for begin in range(0, N_TOKENS, n_batch):
        batch.n_tokens = n_batch
        for i in range(n_batch):
            batch.token[i], batch.pos[i], batch.logits[i] = tokens[begin + i], begin + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if api.llama_decode(context, batch):
            sys.exit("llama.cpp cannot decode")
        parts.append(np.ctypeslib.as_array(api.llama_get_logits(context), (n_batch, n_vocab)).copy())
    api.llama_batch_free(batch)
    api.llama_free(context)
    return np.concatenate(parts)


def python(site, *arguments):
    """Run a Python that imports kvtool_llama from the folder `site`. Return its stdout.

    site: None for the package of this Python.
    """
    environment = dict(os.environ)
    if site:
        environment["PYTHONPATH"] = str(site)
        environment.pop("LLAMA_CPP_LIB_PATH", None)
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return done.stdout


def run(out, site, paths):
    """Write the logits of a library. Return the library's path, and whether it is patched."""
    out.mkdir()
    python(site, __file__, "--work", out, *paths)
    path, patched = (out / "library").read_text().split("\n")
    return path, patched == "True"


def compare(site, archs):
    from kvtool.models.header import read
    from kvtool.models.resolve import resolve
    from kvtool.models.supported import unsupported
    from tests import tiny

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        tiny.write_llama(folder / "tiny.gguf", head_dim=64)
        tiny.write_gemma3(folder / "gemma3.gguf", head_dim=64)
        paths = [folder / "tiny.gguf", folder / "gemma3.gguf", resolve("smollm2-135m")]
        if archs:
            paths += [path for path in sorted(archs.glob("*.gguf")) if not unsupported(read(path))]
        names = [*MODELS, *(path.stem for path in paths[len(MODELS) :])]
        sides = {}
        for name, folder_of_library, is_patched in (("stock", site, False), ("patched", None, True)):
            path, patched = run(folder / name, folder_of_library, paths)
            if patched != is_patched:
                sys.exit(f"{path} is {'patched' if patched else 'not patched'}; it was to be the {name} one")
            print(f"{name}: {path}")
            sides[name] = folder / name
        n_different = 0
        for number, (model, flash, type_k, type_v, batch) in enumerate(cases(paths)):
            stock_logits, logits = (np.load(side / f"{number}.npy") for side in sides.values())
            same = stock_logits.tobytes() == logits.tobytes()
            n_different += not same
            verdict = "same" if same else f"DIFFERENT, by up to {np.abs(stock_logits - logits).max():.3g}"
            print(f"{names[model]:8} flash {flash:4} K {type_k:5} V {type_v:5} batch {batch:3}  {verdict}")
        return n_different


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*map(Path, sys.argv[2:]))
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
        parser.add_argument("site", type=Path, help="folder with an unpatched kvtool_llama package")
        parser.add_argument("--archs", type=Path, help="folder of more models")
        arguments = parser.parse_args()
        if not (arguments.site / "kvtool_llama").is_dir():
            parser.error(f"no kvtool_llama in {arguments.site}")
        sys.exit(compare(arguments.site, arguments.archs) > 0)
