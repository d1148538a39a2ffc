#!/usr/bin/env python
"""Streams an answer of SmolLM2-135M-Instruct with its P-EAGLE head, then compares speed and tokens with plain decoding.

Example: python examples/quickstart.py --prompt "Explain how a rainbow forms." --num-assistant-tokens 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_peagle import PEagleDrafterModel, SpeculationStats, collect_statistics
from hf_peagle.example_target import example_target, target_origin

HEAD = Path(__file__).parents[1] / "model_cards" / "peagle-smollm2-135m-instruct"
PROMPT = "Write a short story about a lighthouse keeper who finds a message in a bottle."


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-assistant-tokens", type=int, help="tokens drafted per round (default: chosen while decoding)")
    parser.add_argument("--target", help="folder or Hub id of the target (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--head", default=str(HEAD), help="folder or Hub id of the head")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each kind, in turn; medians are printed")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    head = load_head(arguments.head)
    folder = arguments.target or example_target()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    head = head.to(target.device)

    chat = [{"role": "user", "content": arguments.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": arguments.max_new_tokens}
    drafting = {**options, "assistant_model": head}
    if arguments.num_assistant_tokens is not None:
        drafting["num_assistant_tokens"] = arguments.num_assistant_tokens

    print(f"\n{arguments.prompt}\n")
    # Both runs are a warm-up too: the first passes allocate memory and choose kernels.
    target.generate(**inputs, **drafting, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    target.generate(**inputs, **options)

    drafted = [timed(target, inputs, drafting)]
    plain = [timed(target, inputs, options)]
    for _ in range(arguments.runs - 1):
        drafted.append(timed(target, inputs, drafting))
        plain.append(timed(target, inputs, options))
    report(folder, drafted, plain)


def load_head(location: str) -> PEagleDrafterModel:
    """The head, or the end of the program with what to do."""
    try:
        return PEagleDrafterModel.from_pretrained(location, dtype=torch.float32).eval()
    except OSError as error:
        sys.exit(
            f"No P-EAGLE head at {location}: {error}\n"
            "Give the folder or Hub id of a head with --head, or train one:\n"
            "  python scripts/train.py --help"
        )


def timed(target: Any, inputs: Any, options: dict[str, Any]) -> tuple[torch.Tensor, float, SpeculationStats | None]:
    """New tokens, seconds, and the statistics if a head drafted."""
    with collect_statistics() as calls:
        start = time.perf_counter()
        tokens = target.generate(**inputs, **options)
        seconds = time.perf_counter() - start
    return tokens[0, inputs["input_ids"].shape[1] :], seconds, calls[0] if calls else None


def report(folder: Any, drafted: list[Any], plain: list[Any]) -> None:
    tokens, _, stats = drafted[0]
    count = len(tokens)
    head_rate = count / statistics.median(seconds for _, seconds, _ in drafted)
    plain_rate = len(plain[0][0]) / statistics.median(seconds for _, seconds, _ in plain)
    identical = all(torch.equal(tokens, other) for other, _, _ in drafted + plain)
    print(f"\n{count} tokens, target {folder} (weights from: {target_origin(folder)})\n")
    print(f"{'':<22}{'tokens/s':>10}{'acceptance length':>20}{'target forwards/token':>24}")
    forwards = stats.target_forwards / stats.generated_tokens
    print(f"{'with the head':<22}{head_rate:>10.1f}{stats.acceptance_length:>20.2f}{forwards:>24.2f}")
    print(f"{'plain decoding':<22}{plain_rate:>10.1f}{1:>20.2f}{1:>24.2f}")
    print(f"\nspeed ratio {head_rate / plain_rate:.2f}, tokens identical: {'yes' if identical else 'NO'}")
    by_depth = ", ".join(f"{share:.2f}" for share in stats.acceptance_by_depth)
    print(f"share of drafts accepted at depth 1, 2, …: {by_depth}")


if __name__ == "__main__":
    main()
