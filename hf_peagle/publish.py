"""Publishing a head: check its folder, gather what belongs into the repository, upload all of it in one commit."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import head_card
from .check_folder import FolderCheck, check_folder
from .model_card import make_card

logger = logging.getLogger(__name__)

# Everything else in a folder (optimiser states, logs, notes) stays at home.
UPLOADED = ("config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json", "README.md", head_card.FILE)
UPLOADED_TOO = ("LICENSE*", "*.py", "custom_generate/*", "plots/*.png", "plots/*.svg")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class PublishError(RuntimeError):
    """Publishing failed; the message says why, what to do, and what state the repository is in."""


@dataclass
class Plan:
    """What would be uploaded: path in the repository -> local file, and what is left out."""

    files: dict[str, Path]
    left_out: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.stat().st_size for file in self.files.values())

    def listing(self) -> str:
        """Paths with sizes in bytes, one a line, and the sum."""
        lines = [f"{file.stat().st_size:>12,}  {path}" for path, file in sorted(self.files.items())]
        return "\n".join([*lines, f"{self.size:>12,}  in {len(self.files)} files"])


@dataclass
class Published:
    """Where the head is now."""

    repo_id: str
    commit: str
    url: str


@contextlib.contextmanager
def planned(folder: str | os.PathLike[str], repo_id: str, check: FolderCheck) -> Iterator[Plan]:
    """
    The upload of a checked folder, valid inside the block. Code is added where the folder has none, and the card names
    `repo_id` in its examples; such files are made in a temporary folder, and `folder` stays as it is.
    """
    folder = Path(folder)
    wanted = (*UPLOADED, *UPLOADED_TOO)
    present = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    files = {path: folder / path for path in present if any(fnmatch(path, pattern) for pattern in wanted) and path.count("/") < 2}
    left_out = [path for path in present if path not in files]
    with tempfile.TemporaryDirectory(prefix="peagle-publish-") as name:
        stage = Path(name)
        if not check.has_code:
            assert check.head is not None
            saved = stage / "code"
            # Weights come from the folder itself, bit for bit.
            check.head.save_pretrained(saved, state_dict={})
            own = (p for p in saved.rglob("*") if p.is_file() and p.suffix != ".safetensors" and p.name != "README.md")
            files.update({p.relative_to(saved).as_posix(): p for p in own})
        if head_card.FILE in files:
            (stage / "README.md").write_text(make_card(folder, repo_id), encoding="utf-8")
            files["README.md"] = stage / "README.md"
        yield Plan(files, left_out)


def publish(
    folder: str | os.PathLike[str],
    repo_id: str,
    private: bool = True,
    revision: str | None = None,
    message: str = "Upload P-EAGLE head",
    api: Any = None,
    check: FolderCheck | None = None,
) -> Published:
    """
    Checks `folder`, creates the repository if there is none, and uploads in one commit: readers see the old state or the
    new one. Large files that arrived before an interruption are not sent again.

    Args:
        repo_id (`str`): `"owner/name"`.
        private (`bool`): visibility of a new repository; one that exists keeps its own.
        revision (`str`, *optional*): branch to commit to, created from main if there is none. Default: main.
        api (`HfApi`, *optional*): client to use. Default: one with the token of `hf auth login` or HF_TOKEN.
        check (`FolderCheck`, *optional*): of an earlier `check_folder(folder)`.

    Raises:
        PublishError: with the reason, the remedy and the state of the repository.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    check = check_folder(folder) if check is None else check
    if not check.passed:
        raise PublishError("Nothing was uploaded:\n" + "\n".join(f"- {error}" for error in check.errors))
    if not _NAME.fullmatch(repo_id):
        raise PublishError(f"repo_id={repo_id!r}: give owner/name, of letters, digits, '-', '_' and '.'.")
    api = HfApi() if api is None else api
    step = "creating the repository"
    try:
        with planned(folder, repo_id, check) as plan:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                step = f"creating the branch {revision}"
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            step = "reading the repository"
            parent = api.repo_info(repo_id, revision=revision).sha
            step = "uploading"
            operations = [CommitOperationAdd(path, str(file)) for path, file in sorted(plan.files.items())]
            commit = api.create_commit(repo_id, operations, commit_message=message, revision=revision, parent_commit=parent)
    except KeyboardInterrupt:
        raise PublishError(f"Interrupted while {step}. {_STATE} Run the same command again to go on.") from None
    except Exception as error:
        raise PublishError(explain(error, repo_id, step)) from error
    return Published(repo_id, commit.oid, f"{api.endpoint}/{repo_id}")


_STATE = "The repository's files are as they were, and nothing local was changed."
_REMEDIES = {
    401: "The Hub does not accept the token, or there is none. Log in with `hf auth login`, or set HF_TOKEN to a token with write access.",
    403: "The token may not write to {repo_id}. Use one with write access to that owner's repositories, or publish under your own name.",
    404: "{repo_id} or the branch does not exist, or the token may not see it. Check the spelling and the token's access.",
    409: "The Hub reports a conflict: somebody else changed {repo_id} at the same time. Run the command again.",
    412: "Somebody else committed to {repo_id} meanwhile. Look at their change, then run the command again.",
    413: "A file is too large for the Hub. Save the head in shards: head.save_pretrained(folder, max_shard_size='5GB').",
    429: "Too many requests. Wait a few minutes, then run the command again.",
    507: "There is no room left for {repo_id} on the Hub. Free some, then run the command again.",
}


def explain(error: BaseException, repo_id: str, step: str) -> str:
    """What happened, what to do, and in what state things are; never a token."""
    chain = list(_chain(error))
    responses = [getattr(e, "response", None) for e in chain]
    response = next((r for r in responses if r is not None), None)
    full = any(isinstance(e, OSError) and e.errno == errno.ENOSPC for e in chain) or any("os error 28" in str(e) for e in chain)
    if full:
        reason = f"The disk is full: {tempfile.gettempdir()} needs room for the code and the card. Free some, or set TMPDIR to another disk."
    elif response is not None:
        known = _REMEDIES.get(response.status_code)
        reason = known.format(repo_id=repo_id) if known else "Run the command again; if it stays, see https://status.huggingface.co."
        said = response.headers.get("X-Error-Message")
        reason = f"The Hub answered {response.status_code}{f' ({said})' if said else ''}. {reason}"
    elif any("connect" in type(e).__name__.lower() or "timeout" in type(e).__name__.lower() for e in chain):
        reason = "The Hub cannot be reached. Check the network, HF_ENDPOINT and HF_HUB_OFFLINE, then run the command again."
    else:
        reason = f"{type(error).__name__}: {error}"
    return hide_tokens(f"Failed while {step}. {reason} {_STATE}")


def hide_tokens(text: str) -> str:
    """`text` without anything that looks like an access token."""
    return re.sub(r"hf_\w{6,}|Bearer \S+", "<token>", text)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of scripts/publish.py; returns the exit code."""
    parser = argparse.ArgumentParser(description="Checks a P-EAGLE head's folder and publishes it on the Hugging Face Hub.")
    parser.add_argument("folder", help="folder of the head")
    parser.add_argument("repo_id", help="owner/name on the Hub")
    parser.add_argument("--public", action="store_true", help="make a new repository public (default: private)")
    parser.add_argument("--revision", help="branch to upload to, created if there is none (default: main)")
    parser.add_argument("--message", default="Upload P-EAGLE head", help="commit message")
    parser.add_argument("--dry-run", action="store_true", help="check, list files and sizes, and upload nothing")
    options = parser.parse_args(arguments)
    check = check_folder(options.folder)
    for warning in check.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for error in check.errors:
        print(f"error: {error}", file=sys.stderr)
    if not check.passed:
        print("Nothing was uploaded.", file=sys.stderr)
        return 1
    if options.dry_run:
        with planned(options.folder, options.repo_id, check) as plan:
            print(plan.listing())
            if plan.left_out:
                print(f"not uploaded: {', '.join(plan.left_out)}")
        return 0
    try:
        done = publish(options.folder, options.repo_id, not options.public, options.revision, options.message, check=check)
    except PublishError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{done.url} at commit {done.commit}")
    print(f'AutoModel.from_pretrained("{done.repo_id}", revision="{done.commit}", trust_remote_code=True)')
    return 0
