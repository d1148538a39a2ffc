"""The model card of a head, made from its configuration and its results file; it holds no figure of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from . import head_card
from .configuration_peagle import PEagleConfig
from .head_card import CardError
from .starter_card import TAGS, summary, target_name, usage

BENCHMARKS = {"mt_bench": "MT-Bench", "humaneval": "HumanEval", "gsm8k": "GSM8K", "alpaca": "Alpaca"}

TEMPLATE = """\
---
{metadata}---

# {name}

{summary}

{headline}

## Use

{usage}

How many tokens to draft: without a number the length adapts to measured times and acceptance; `num_assistant_tokens={draft_length}`
fixes it at this head's recommendation. Greedy output is the target's own token for token in float32; in half precision two nearly
equal logits may change places.

### With vLLM

The head must be written in vLLM's format first, with the hf_peagle repository:

```bash
{convert}
{serve}
```
{vllm_notes}
## Acceptance

{acceptance}

## Speed

{speed}

## When it pays

{break_even}

## Training

{training}

## The head

{head}
{plots}
## Limits

{limits}
"""

LIMITS = (
    "Drafts for the target it was trained for, and for that target's weights; finetunes of it accept fewer drafts.",
    "Acceptance depends on the text: it is measured on the prompts named above and differs on others.",
    "The output is the target's, with the target's mistakes and biases.",
)


def make_card(folder: str | os.PathLike[str], repo_id: str | None = None) -> str:
    """
    The README.md of the head in `folder`, from its `config.json` and `head_card.json`.

    Args:
        repo_id (`str`, *optional*): the repository that the examples name. Default: the results file's, else the
            folder's name.

    Raises:
        CardError: there is no results file, or it lacks something.
    """
    folder = Path(folder)
    facts = head_card.read(folder)
    if facts is None:
        raise CardError(f"{folder} has no {head_card.FILE}, the results a card is made from.")
    config = PEagleConfig.from_pretrained(folder)
    assert isinstance(config, PEagleConfig)
    repo_id = repo_id or facts.get("repo_id") or folder.resolve().name
    target = facts.get("target", {}).get("repo_id") or target_name(config)
    config.target_name_or_path = target
    for plot in facts.get("plots", []):
        if not (folder / plot["file"]).is_file():
            raise CardError(f"{folder / head_card.FILE}: plots names {plot['file']}, which is not in the folder.")
    return TEMPLATE.format(
        metadata=yaml.safe_dump(metadata(config, facts, repo_id), sort_keys=False, allow_unicode=True, width=1000),
        name=repo_id.rsplit("/", 1)[-1],
        summary=summary(config),
        headline=_headline(facts),
        usage=usage(config, repo_id),
        draft_length=config.draft_length,
        repo_id=repo_id,
        target=target,
        convert=_convert_line(config, facts, repo_id, target),
        serve=_serve_line(config, target),
        vllm_notes=_vllm_notes(config, facts),
        acceptance=_acceptance(facts),
        speed=_speed(facts),
        break_even=_break_even(facts),
        training=_training(facts),
        head=_table(("", ""), _head_rows(config, folder)),
        plots="".join(f"\n![{plot['caption']}]({plot['file']})\n" for plot in facts.get("plots", [])),
        limits="\n".join(f"- {limit}" for limit in [*facts.get("limits", []), *LIMITS]),
    )


def metadata(config: PEagleConfig, facts: Mapping[str, Any], repo_id: str) -> dict[str, Any]:
    """The card's YAML block as the Hub reads it, measured results included."""
    data: dict[str, Any] = {"license": facts["license"]}
    if facts.get("language"):
        data["language"] = facts["language"]
    if "/" in (target := target_name(config)):
        data["base_model"] = target
    data |= {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": list(TAGS)}
    if datasets := [entry["repo_id"] for entry in facts.get("datasets", []) if entry.get("repo_id")]:
        data["datasets"] = datasets
    if results := _results(facts):
        data["model-index"] = [{"name": repo_id.rsplit("/", 1)[-1], "results": results}]
    return data


def _results(facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for entry in facts.get("evaluation", []):
        lengths = {"all": entry["acceptance_length"], **entry.get("by_benchmark", {})}
        for source, value in lengths.items():
            metric = {"type": "acceptance_length", "name": f"Acceptance length, K={entry['k']}", "value": round(value, 4)}
            dataset = {"type": source, "name": "All prompts" if source == "all" else BENCHMARKS.get(source, source)}
            results.append({"task": _task(), "dataset": dataset, "metrics": [metric]})
    for entry in facts.get("speed", []):
        where = f"{entry['hardware']}, {entry['dtype']}, batch {entry['batch_size']}"
        metrics = [
            {
                "type": "speedup",
                "name": f"Speed relative to plain decoding, {_length(row)}{_variant(row)}, {where}",
                "value": round(row["speedup_median"], 4),
            }
            for row in entry["rows"]
        ]
        results.append({"task": _task(), "dataset": {"type": "benchmark", "name": "Benchmark prompts"}, "metrics": metrics})
    return results


def _task() -> dict[str, str]:
    return {"type": "text-generation", "name": "Speculative decoding"}  # a fresh one each time: YAML writes aliases for shared ones


# ---------------------------------------------------------------------- sections


def _headline(facts: Mapping[str, Any]) -> str:
    """The two figures a reader looks for, with where they come from."""
    parts = []
    if evaluations := facts.get("evaluation"):
        best = max(evaluations, key=lambda entry: entry["acceptance_length"])
        parts.append(f"Acceptance length (tokens per target pass, greedy): **{best['acceptance_length']:.2f}** at K={best['k']}.")
    else:
        parts.append("Its acceptance length has not been measured.")
    rows = [(entry, row) for entry in facts.get("speed", []) for row in entry["rows"]]
    if rows:
        entry, row = max(rows, key=lambda pair: pair[1]["speedup_median"])
        parts.append(
            f"Speed relative to plain decoding: **{row['speedup_median']:.2f}×** at best ({_length(row)}, {entry['dtype']}, "
            f"batch {entry['batch_size']}, {entry['hardware']})."
        )
    else:
        parts.append("Its speed has not been measured.")
    return " ".join(parts)


def _acceptance(facts: Mapping[str, Any]) -> str:
    evaluations = sorted(facts.get("evaluation", []), key=lambda entry: entry["k"])
    if not evaluations:
        return "Not measured."
    sources = list(dict.fromkeys(source for entry in evaluations for source in entry.get("by_benchmark", {})))
    body = []
    for entry in evaluations:
        values = [entry.get("by_benchmark", {}).get(source) for source in sources]
        body.append([str(entry["k"]), f"**{entry['acceptance_length']:.2f}**", *(_number(value) for value in values)])
    text = _table(["K", "all", *(BENCHMARKS.get(source, source) for source in sources)], body)
    lines = ["Mean committed tokens per verifying pass of the target: accepted drafts plus the target's own token.", "", text]
    shares = [entry for entry in evaluations if entry.get("accepted_share")]
    if shares:
        deepest = max(len(entry["accepted_share"]) for entry in shares)
        rows = [[str(entry["k"]), *(_percent(share) for share in _padded(entry["accepted_share"], deepest))] for entry in shares]
        head = ["K", *(str(depth) for depth in range(1, deepest + 1))]
        lines += ["", "Share of rounds that accept draft 1, 2, …:", "", _table(head, rows)]
    lines += ["", *(f"- K={entry['k']}: {entry['how']}{_size(entry)}." for entry in evaluations)]
    return "\n".join(lines)


def _speed(facts: Mapping[str, Any]) -> str:
    lines = []
    for entry in facts.get("speed", []):
        about = f"**{entry['hardware']}, {entry['dtype']}, batch {entry['batch_size']}**"
        details = [f"{entry['prompts']} prompts" if entry.get("prompts") else "", entry.get("target", ""), entry.get("date", "")]
        detail = ", ".join(str(d) for d in details if d)
        lines += [f"{about}{f' ({detail})' if detail else ''}:", ""]
        body = []
        for row in entry["rows"]:
            spread = f"{row['speedup_median']:.2f} [{row['speedup_min']:.2f}, {row['speedup_max']:.2f}]"
            times = [_number(row.get("draft_ms"), 1), _number(row.get("verify_ms"), 1)]
            body.append([_length(row) + _variant(row), f"{row['acceptance_length']:.2f}", spread, *times, str(row["identical"])])
        lines += [_table(["drafts", "acceptance length", "× plain, median [min, max]", "draft ms", "verify ms", "identical"], body), ""]
        if entry.get("command"):
            lines += [f"`{entry['command']}`", ""]
    if not lines:
        return "Not measured. `scripts/benchmark.py` of the hf_peagle repository measures it on your machine."
    lines.append("Ratios against plain `generate()` of the same target in the same process, prompts answered in turn.")
    return "\n".join(lines)


def _break_even(facts: Mapping[str, Any]) -> str:
    """A round costs the same whatever is accepted, so speed is proportional to acceptance: it pays from length / speed on."""
    lines = [
        "A round of K drafts costs one pass of the head and one of the target over K+1 tokens. It pays if the acceptance length "
        "exceeds what that costs in plain decoding steps. That depends on the machine, not on the text.",
        "",
    ]
    body = []
    for entry in facts.get("speed", []):
        for row in entry["rows"]:
            needed = row["acceptance_length"] / row["speedup_median"]
            verdict = "pays" if row["speedup_median"] > 1 else "does not pay"
            where = f"{entry['hardware']}, {entry['dtype']}, batch {entry['batch_size']}"
            body.append([where, _length(row) + _variant(row), f"{needed:.2f}", f"{row['acceptance_length']:.2f}", verdict])
    if body:
        lines.append(_table(["machine", "drafts", "needed acceptance length", "reached", ""], body))
    else:
        lines.append("What is needed has not been measured for this head on any machine; the adaptive length drafts nothing where it does not pay.")
    return "\n".join(lines)


def _training(facts: Mapping[str, Any]) -> str:
    lines = []
    if training := facts.get("training"):
        lines.append(_table(("", ""), [[str(label), _cell(value)] for label, value in training.items()]))
    if datasets := facts.get("datasets"):
        rows = []
        for entry in datasets:
            link = f"[{entry['name']}](https://huggingface.co/datasets/{entry['repo_id']})" if entry.get("repo_id") else entry["name"]
            rows.append([link, entry["use"]])
        lines += ["", _table(("data", "use"), rows)]
    return "\n".join(lines).strip() or "Not recorded."


def _head_rows(config: PEagleConfig, folder: Path) -> list[list[str]]:
    tables = [name for name, shared in (("embeddings", config.share_embeddings), ("lm_head", config.share_lm_head)) if shared]
    rows = [
        ["layers", str(config.num_hidden_layers)],
        ["width, MLP width", f"{config.hidden_size}, {config.intermediate_size}"],
        ["attention heads (key/value heads)", f"{config.num_attention_heads} ({config.num_key_value_heads}), {config.head_dim} wide"],
        ["draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"],
        ["reads the target's streams", ", ".join(str(i) for i in config.target_layer_ids or [])],
        ["shared with the target", ", ".join(tables) or "nothing"],
        ["trained depths", str(config.num_depths)],
    ]
    if stored := _stored(folder):
        rows.append(["stored weights", stored])
    return rows


def _stored(folder: Path) -> str:
    from safetensors import safe_open

    count, types = 0, set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                piece = tensors.get_slice(name)
                if not name.endswith(("d2t", "t2d")):
                    size = 1
                    for length in piece.get_shape():
                        size *= length
                    count += size
                    types.add(piece.get_dtype())
    return f"{count / 1e6:.1f} M, {', '.join(sorted(types))}" if count else ""


def _convert_line(config: PEagleConfig, facts: Mapping[str, Any], repo_id: str, target: str) -> str:
    line = f"python scripts/convert.py {repo_id} OUT --to vllm --target {target}"
    if _needs_mask_token(config):
        line += f" --mask-token-id {facts.get('export_mask_token_id', 'ID')}"
    return line


def _needs_mask_token(config: PEagleConfig) -> bool:
    return config.algorithm == "peagle" and config.mask_token_id is None


def _vllm_notes(config: PEagleConfig, facts: Mapping[str, Any]) -> str:
    notes = []
    if _needs_mask_token(config) and "export_mask_token_id" not in facts:
        notes.append("ID: a reserved token of the target that never occurs in text; the mask slot's vector is written to its row.")
    if config.fc_norm:
        notes.append("This head norms every captured stream (`fc_norm`): it needs a vLLM whose EAGLE-3 model has these norms.")
    return "\n" + "\n\n".join(notes) + "\n" if notes else ""


def _serve_line(config: PEagleConfig, target: str) -> str:
    from .formats.vllm import serve_command

    return serve_command("OUT", target, config.draft_length, config.algorithm == "peagle")


# ---------------------------------------------------------------------- small pieces


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "-|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body)])


def _length(row: Mapping[str, Any]) -> str:
    return f"K={row['k']}" if isinstance(row["k"], int) else str(row["k"])


def _variant(row: Mapping[str, Any]) -> str:
    return f" ({row['variant']})" if row.get("variant") else ""


def _size(entry: Mapping[str, Any]) -> str:
    return f" ({entry['tokens']:,} tokens in {entry['rounds']:,} rounds)" if entry.get("tokens") and entry.get("rounds") else ""


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10000 else str(value)


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _padded(values: Sequence[float], length: int) -> list[float | None]:
    return [*values, *[None] * (length - len(values))]
