#!/usr/bin/env python
"""Writes a target's own answers to prompts as JSONL shards. Run it again to go on after an interruption.

Example: python scripts/generate_answers.py --target HuggingFaceTB/SmolLM2-135M-Instruct --prompts a.jsonl=2 b.jsonl \\
    --output answers
"""

from __future__ import annotations

import argparse
import dataclasses
import logging

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_peagle.training.answers import AnswerConfig, default_dtype, generate_answers
from hf_peagle.training.prompts import PromptSource, mix_prompts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub name of the target model")
    parser.add_argument("--prompts", required=True, nargs="+", metavar="LOCATION[=WEIGHT]")
    parser.add_argument("--output", required=True, help="folder of the shards")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-broken", type=int, default=20, help="broken prompt lines to skip before giving up")
    for option in dataclasses.fields(AnswerConfig):
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default)
        else:
            parser.add_argument(flag, type=type(option.default), default=option.default)
    return parser.parse_args()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    arguments = parse_arguments()
    config = AnswerConfig(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(AnswerConfig)})
    sources = [PromptSource.parse(text) for text in arguments.prompts]
    prompts = mix_prompts(sources, seed=config.seed, max_broken=arguments.max_broken)
    dtype = default_dtype() if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(arguments.device).eval()
    generate_answers(model, tokenizer, prompts, arguments.output, config)


if __name__ == "__main__":
    main()
