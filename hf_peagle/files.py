"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """
    Lets `write` fill a temporary file beside `path` and gives it that name once it is on the disk. Interrupted or failing,
    it leaves what was there. The folder is made if there is none.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces `path` by `text` in UTF-8, whole or not at all."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8") and None)
