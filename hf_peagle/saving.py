"""Saving and uploading a head so that it can be used without this package: weights, configuration, code and a card."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from .custom_generate_file import write_custom_generate
from .starter_card import starter_card

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class SelfContainedSaving:
    """The saving side of a drafter model; stands before `PreTrainedModel` among its bases."""

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, save_code: bool = True, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """
        As in transformers: weights, configuration and the code that `trust_remote_code=True` runs; also `custom_generate/`
        and, where there is none yet, a short README.md. The files get their names only when all are written, so an
        interruption or a full disk leaves what was in `save_directory` as it was.

        Args:
            save_code (`bool`): without it no code is written, and loading needs the installed package.
            push_to_hub (`bool`): uploads as well, as [`push_to_hub`] does with `repo_id` (default: the folder's name),
                `private`, `token`, `revision`, `commit_message` and `create_pr`.
        """
        folder = Path(save_directory)
        names = ("repo_id", "private", "revision", "commit_message", "commit_description", "create_pr", "tags")
        hub = {name: kwargs.pop(name) for name in names if name in kwargs}
        folder.mkdir(parents=True, exist_ok=True)
        workplace = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
        try:
            with _CodeSwitch(self, save_code):
                super().save_pretrained(workplace, *args, **kwargs)  # type: ignore[misc]
            if (workplace / "config.json").exists():  # only the main process of several writes
                if save_code:
                    write_custom_generate(workplace)
                if not (folder / "README.md").exists():
                    text = starter_card(self.config, folder.resolve().name, save_code)  # type: ignore[attr-defined]
                    (workplace / "README.md").write_text(text, encoding="utf-8")
                _move_into(workplace, folder, replaces_weights=kwargs.get("variant") is None)
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
        if push_to_hub:
            self.push_to_hub(hub.pop("repo_id", folder.resolve().name), token=kwargs.get("token"), **hub)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ) -> Any:
        """
        As in transformers, in one commit. A README.md that the repository has already is kept; else it gets a short one,
        with `tags` added to its own. `scripts/publish.py` of this project checks more before it uploads.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory(prefix="peagle-head-") as name:
            folder = Path(name)
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            (folder / "README.md").write_text(starter_card(self.config, repo_id, tags=tags), encoding="utf-8")  # type: ignore[attr-defined]
            if revision is not None and not revision.startswith("refs/pr"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            if api.file_exists(repo_id, "README.md", revision=revision):
                (folder / "README.md").unlink()
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message or "Upload P-EAGLE head",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )


class _CodeSwitch:
    """Inside the block, saving `head` writes code or not, and its configuration has an `auto_map` or not."""

    def __init__(self, head: Any, save_code: bool) -> None:
        self.head, self.save_code = head, save_code

    def __enter__(self) -> None:
        config = self.head.config
        # A head that was loaded from, or saved to, a folder with code keeps the map of that folder.
        self.auto_map = config.__dict__.pop("auto_map", None)
        if not self.save_code:
            # Attributes of these two objects only: their classes may be saving elsewhere, in another thread.
            self.head._auto_class = config._auto_class = None
            self.head.is_remote_code = lambda: False

    def __exit__(self, *_: Any) -> None:
        if not self.save_code:
            del self.head._auto_class, self.head.config._auto_class, self.head.is_remote_code
        if self.auto_map is not None and "auto_map" not in self.head.config.__dict__:
            self.head.config.auto_map = self.auto_map


def _move_into(workplace: Path, folder: Path, replaces_weights: bool) -> None:
    """Gives the files of `workplace` their names in `folder`, the configuration last, and removes older weights."""
    files = sorted((p for p in workplace.rglob("*") if p.is_file()), key=lambda p: p.name == "config.json")
    for file in files:
        place = folder / file.relative_to(workplace)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
    written = {file.name for file in files}
    for old in folder.iterdir():
        if replaces_weights and _WEIGHTS.fullmatch(old.name) and old.name not in written:
            old.unlink()
