"""The parts of a model card that follow from a head's configuration alone: its metadata, and how to use it."""

from __future__ import annotations

from typing import Any

TAGS = ("peagle", "speculative-decoding", "custom_generate")


def starter_card(config: Any, repo_id: str, has_code: bool = True, tags: list[str] | None = None) -> str:
    """
    A README.md without figures, for a head that nothing has been measured of yet.

    Args:
        config (`PEagleConfig`): of the head.
        repo_id (`str`): repository or folder to show in the examples.
        has_code (`bool`): whether the code is saved with the head.
        tags (`list[str]`, *optional*): further tags.
    """
    lines = ["---"]
    if config.target_name_or_path and _is_hub_id(config.target_name_or_path):
        lines += [f"base_model: {config.target_name_or_path}"]
    lines += ["library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {tag}" for tag in dict.fromkeys([*TAGS, *(tags or [])])]
    lines += ["---", "", f"# {repo_id.rsplit('/', 1)[-1]}", ""]
    lines += [summary(config), "", "## Use", "", usage(config, repo_id, has_code), "", "Nothing has been measured for this card yet."]
    return "\n".join(lines) + "\n"


def summary(config: Any) -> str:
    """One paragraph: what the head is and what it is for."""
    kind = "P-EAGLE head (arXiv 2602.01469)" if config.algorithm == "peagle" else "EAGLE-3 head (arXiv 2503.01840)"
    how = "in one forward pass" if config.algorithm == "peagle" else "one by one"
    return (
        f"A {kind} for speculative decoding of {target_name(config)}: {_layers(config.num_hidden_layers)} of width "
        f"{config.hidden_size}, drafting tokens {how} from a vocabulary of {config.draft_vocab_size:,}. The target verifies "
        "them, so the output is the target's own."
    )


def usage(config: Any, repo_id: str, has_code: bool = True) -> str:
    """Markdown: how to load the head and generate with it."""
    trust, start = (", trust_remote_code=True", []) if has_code else ("", ["import hf_peagle  # the package must be installed"])
    lines = [
        "```python",
        *start,
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{target_name(config)}")',
        f'target = AutoModelForCausalLM.from_pretrained("{target_name(config)}", dtype="auto")',
        f'head = AutoModel.from_pretrained("{repo_id}"{trust}, dtype=target.dtype).to(target.device)',
        "",
        'chat = [{"role": "user", "content": "Why is the sky blue?"}]',
        'inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
        "output = target.generate(**inputs.to(target.device), assistant_model=head, max_new_tokens=200)",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        "```",
    ]
    if has_code:
        lines += [
            "",
            "Loading runs code from this repository; read it, and pin what you read with `revision=` and a commit. The same without "
            "a change to transformers' own methods:",
            "",
            "```python",
            f'target.generate(**inputs, assistant_model=head, custom_generate="{repo_id}", trust_remote_code=True)',
            "```",
        ]
    return "\n".join(lines)


def target_name(config: Any) -> str:
    """The target's name for text and examples; a local path tells a reader nothing."""
    name = config.target_name_or_path
    return name if name and _is_hub_id(name) else (name.rstrip("/").rsplit("/", 1)[-1] if name else "TARGET")


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith(("/", ".", "~"))


def _layers(count: int) -> str:
    return "one layer" if count == 1 else f"{count} layers"
