"""The page itself: the files of ``page/``, which need no build."""

from __future__ import annotations

import shutil
from importlib import resources
from pathlib import Path


def page_folder() -> Path:
    """Where the page's files are in the installed package."""
    return Path(str(resources.files("qlora_wgpu.web"))) / "page"


def put_page(folder: Path) -> None:
    """Copies the page, its libraries with their licences included."""
    shutil.copytree(page_folder(), folder, dirs_exist_ok=True)
