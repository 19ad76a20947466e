"""Chat templates of published models, from the llama.cpp sources that kvtool's build uses."""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import PurePosixPath

import pytest

from kvtool.build import sources

WANT_FUNCTIONS = {"fireworks-ai-llama-3-firefunction-v2"}
"""Templates that cannot render a chat unless their variable for tools is set."""


@cache
def templates() -> dict[str, str]:
    """Return the Jinja text of each template. The key is the file's name without its ending.

    Return {} if llama.cpp's sources are missing.
    """
    archive_path = sources.place(sources.Upstream.read(sources.patches_dir()))
    texts: dict[str, str] = {}
    if archive_path.is_file():
        with tarfile.open(archive_path) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if path.suffix == ".jinja" and path.parent.name == "templates":
                    file = archive.extractfile(member)
                    assert file
                    texts[path.stem] = file.read().decode()
                elif texts and path.parent.name != "templates":
                    # the templates stand together, and reading all of the archive takes two seconds
                    break
    return texts


needs_published = pytest.mark.skipif(not templates(), reason="the sources of llama.cpp are gone")
