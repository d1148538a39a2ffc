"""What must hold of a head's folder before it is published: it loads, it drafts, and its card says what its results say."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from . import head_card
from .head_card import CardError
from .model_card import make_card
from .modeling_peagle import PEagleDrafterModel, TargetWeights

REQUIRED_METADATA = ("library_name", "pipeline_tag", "tags", "base_model", "license")
MODEL_INDEX = "model-index"


@dataclass
class FolderCheck:
    """
    Attributes:
        errors: what forbids publishing, in words.
        warnings: what a maker may want to change.
        has_code: the folder carries the code that `trust_remote_code=True` runs.
    """

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    has_code: bool = False
    head: PEagleDrafterModel | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing forbids publishing."""
        return not self.errors


def check_folder(folder: str | os.PathLike[str]) -> FolderCheck:
    """Checks everything and collects what is wrong, rather than stopping at the first."""
    folder, result = Path(folder), FolderCheck()
    if not folder.is_dir():
        result.errors.append(f"{folder} is not a folder. Give the one that head.save_pretrained or scripts/train.py wrote.")
        return result
    if not (folder / "config.json").is_file():
        result.errors.append(f"{folder} has no config.json. Give the folder that head.save_pretrained or scripts/train.py wrote.")
        return result
    _check_head(folder, result)
    _check_code(folder, result)
    _check_card(folder, result)
    return result


def _check_head(folder: Path, result: FolderCheck) -> None:
    from .formats import is_foreign

    if is_foreign(folder):
        result.errors.append(
            "config.json is of another project's format, which the code in a published repository does not read. "
            "Convert it first: python scripts/convert.py FOLDER OUT --to peagle."
        )
        return
    try:
        head = PEagleDrafterModel.from_pretrained(folder).eval()
    except Exception as error:  # whatever it is, a user would meet it too
        result.errors.append(f"The head does not load: {error}")
        return
    broken = [name for name, tensor in head.state_dict().items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
    if broken:
        result.errors.append(f"Weights with NaN or infinity: {', '.join(broken)}.")
        return
    try:
        problem = draft_once(head)
    except Exception as error:
        problem = f"the pass fails: {type(error).__name__}: {error}"
    if problem:
        result.errors.append(f"The head does not draft: {problem}.")
        return
    result.head = head
    if not head.config.target_name_or_path:
        result.warnings.append("config.json names no target (target_name_or_path); error messages cannot say what the head is for.")


@torch.no_grad()
def draft_once(head: PEagleDrafterModel) -> str | None:
    """Drafts on random features, as many tokens as the head was trained for; says what is wrong with the result."""
    config = head.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (1, 4), generator=generator)
    features = torch.randn(1, 4, config.feature_size, generator=generator).to(head.dtype)
    borrowed = TargetWeights()
    if config.share_embeddings:
        borrowed.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size).to(head.dtype)
    if config.share_lm_head:
        rows = torch.randn(config.draft_vocab_size, config.hidden_size, generator=generator)
        borrowed.lm_head = rows.to(head.dtype)
    count = config.num_depths
    out = head.draft(tokens, features, torch.tensor([4]), count, head.new_cache(1), borrowed=borrowed)
    if out.tokens.shape != (1, count):
        return f"drafts of shape {tuple(out.tokens.shape)} instead of {(1, count)}"
    if not bool(out.logits.isfinite().all()):
        return "logits with NaN or infinity"
    if not bool(((out.tokens >= 0) & (out.tokens < config.vocab_size)).all()):
        return f"drafted ids outside the vocabulary of {config.vocab_size}"
    return None


def _check_code(folder: Path, result: FolderCheck) -> None:
    import json

    auto_map = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map")
    entry = folder / "modeling_peagle.py"
    result.has_code = entry.is_file()
    if not result.has_code:
        if auto_map:
            result.errors.append("config.json has an auto_map, but the code it names is not there. Save the head again.")
        return
    if not auto_map:
        result.errors.append("The code is there, but config.json has no auto_map that names it. Save the head again.")
    if missing := missing_modules(folder, entry):
        result.errors.append(f"The code imports what is not in the folder: {', '.join(missing)}. Save the head again.")
    if not (folder / "custom_generate" / "generate.py").is_file():
        result.errors.append("custom_generate/generate.py is not in the folder. Save the head again.")
    here = Path(__file__).parent
    other = [file.name for file in sorted(folder.glob("*.py")) if _differs(file, here / file.name)]
    if other:
        result.warnings.append(f"Code of another version of hf_peagle than this one: {', '.join(other)}.")


def missing_modules(folder: Path, entry: Path) -> list[str]:
    """Files that `entry` imports from its own folder, directly or through others, and that are not there."""
    seen, missing, waiting = set(), set(), [entry]
    while waiting:
        file = waiting.pop()
        seen.add(file)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                needed = folder / f"{node.module}.py"
                if not needed.is_file():
                    missing.add(needed.name)
                elif needed not in seen:
                    waiting.append(needed)
    return sorted(missing)


def _differs(file: Path, ours: Path) -> bool:
    return not ours.is_file() or file.read_bytes() != ours.read_bytes()


def _check_card(folder: Path, result: FolderCheck) -> None:
    try:
        facts = head_card.read(folder)
    except CardError as error:
        result.errors.append(str(error))
        return
    readme = folder / "README.md"
    if not readme.is_file():
        result.errors.append(f"There is no README.md. Make it from {head_card.FILE}: python scripts/model_card.py {folder}.")
        return
    text = readme.read_text(encoding="utf-8")
    try:
        data = card_metadata(text)
    except CardError as error:
        result.errors.append(f"README.md: {error}")
        return
    if facts is None:
        _check_starter_card(data, result)
        return
    try:
        expected = make_card(folder)
    except CardError as error:
        result.errors.append(str(error))
        return
    if missing := [name for name in REQUIRED_METADATA if not card_metadata(expected).get(name)]:
        result.errors.append(f"{head_card.FILE} does not give the card's {', '.join(missing)}.")
    if text != expected:
        line = first_difference(text, expected)
        result.errors.append(
            f"README.md is not what {head_card.FILE} gives (first at line {line}). Change the results file, then: "
            f"python scripts/model_card.py {folder}."
        )


def _check_starter_card(data: dict[str, Any], result: FolderCheck) -> None:
    if data.get(MODEL_INDEX):
        result.errors.append(f"README.md has results ({MODEL_INDEX}), but there is no {head_card.FILE} that they come from.")
    for name in REQUIRED_METADATA:
        if data.get(name):
            continue
        needed = name in ("library_name", "pipeline_tag", "tags")
        (result.errors if needed else result.warnings).append(f"README.md: the metadata lacks {name}.")
    result.warnings.append(f"Without {head_card.FILE} the card has no measured figures.")


def card_metadata(text: str) -> dict[str, Any]:
    """The YAML block of a card. Raises [`CardError`] where there is none or it cannot be read."""
    if not text.startswith("---\n") or "\n---\n" not in text[3:]:
        raise CardError("the metadata block between two lines of --- is missing at its start.")
    try:
        data = yaml.safe_load(text[4 : text.index("\n---\n", 3)])
    except yaml.YAMLError as error:
        raise CardError(f"the metadata is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise CardError("the metadata is not a list of names and values.")
    return data


def first_difference(text: str, expected: str) -> int:
    """Number of the first line, from 1, at which two texts differ."""
    lines, others = text.splitlines(), expected.splitlines()
    for number, (a, b) in enumerate(zip(lines, others, strict=False), start=1):
        if a != b:
            return number
    return min(len(lines), len(others)) + 1
