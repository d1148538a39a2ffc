#!/usr/bin/env python
"""
Streams an answer of SmolLM2-135M-Instruct drafted by its P-EAGLE head, then compares with plain decoding.

    python examples/quickstart.py --prompt "Explain how a bicycle stays upright."
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from hf_peagle import PEagleDrafterModel, collect_statistics
from hf_peagle.example_target import example_target

HEAD = Path(__file__).parents[1] / "model_cards" / "peagle-smollm2-135m-instruct"


def timed(target: Any, inputs: Any, **kwargs: Any) -> tuple[torch.Tensor, float]:
    """One greedy call and its seconds."""
    begin = time.perf_counter()
    out = target.generate(**inputs, do_sample=False, **kwargs)
    return out, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="Explain in a few sentences how a bicycle stays upright.")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-assistant-tokens", type=int, default=None, help="K; default: chosen while decoding")
    parser.add_argument("--target", default=None, help="folder of the target; default: found or downloaded")
    parser.add_argument("--head", default=str(HEAD), help="folder of the head")
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if not (Path(options.head) / "model.safetensors").exists():
        sys.exit(f"--head {options.head}: there is no model.safetensors. Train a head with scripts/train.py.")

    folder = example_target(options.target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    head = PEagleDrafterModel.from_pretrained(options.head, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": options.prompt}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")

    drafting: dict[str, Any] = {"assistant_model": head}
    if options.num_assistant_tokens is not None:
        drafting["num_assistant_tokens"] = options.num_assistant_tokens
    length = {"max_new_tokens": options.max_new_tokens}
    timed(target, inputs, max_new_tokens=12)  # warm-up
    timed(target, inputs, max_new_tokens=12, **drafting)

    print(f"> {options.prompt}\n")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with collect_statistics() as calls:
        drafted, drafted_seconds = timed(target, inputs, streamer=streamer, **length, **drafting)
    plain, plain_seconds = timed(target, inputs, **length)

    stats, new = calls[0], drafted.shape[1] - inputs["input_ids"].shape[1]
    print(f"\n{'':22}{'P-EAGLE':>10}{'plain':>10}")
    print(f"{'tokens per second':22}{new / drafted_seconds:10.1f}{new / plain_seconds:10.1f}")
    print(f"{'forwards per token':22}{stats.target_forwards / new:10.2f}{1.0:10.2f}")
    print(f"{'acceptance length':22}{stats.acceptance_length:10.2f}{1.0:10.2f}")
    print(f"\nspeed-up {plain_seconds / drafted_seconds:.2f}x, tokens identical: {torch.equal(drafted, plain)}")


if __name__ == "__main__":
    main()
