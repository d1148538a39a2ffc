#!/usr/bin/env python
"""Writes a target's own answers to prompts as JSONL shards. Run it again to go on after an interruption.

Examples:
    python scripts/generate_answers.py --target HuggingFaceTB/SmolLM2-135M-Instruct --prompts a.jsonl=2 b.jsonl \\
        --output answers
    python scripts/generate_answers.py --target Qwen/Qwen3-8B --endpoint http://localhost:8000/v1 --prompts a.jsonl \\
        --output answers
    python scripts/generate_answers.py --target Qwen/Qwen3-8B --given --prompts conversations.jsonl --output answers
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_peagle.training.answers import AnswerConfig, default_dtype, generate_answers, use_given_answers
from hf_peagle.training.endpoint import Endpoint, fetch_answers
from hf_peagle.training.prompts import PromptSource, mix_prompts


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub name of the target (or of its tokenizer)")
    parser.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        metavar="LOCATION[=WEIGHT]",
        help="JSONL files or datasets names (NAME:SPLIT); weights set their shares of the mixture",
    )
    parser.add_argument("--output", required=True, help="folder of the shards")
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-broken", type=int, default=20, help="broken prompt lines to skip before giving up")
    parser.add_argument("--given", action="store_true", help="use the assistant turns in the prompt files as they are")
    parser.add_argument("--endpoint", default="", metavar="URL", help="get answers from an OpenAI-compatible server")
    parser.add_argument("--endpoint-model", default="", help="served name; default: the only one the server lists")
    parser.add_argument("--api-key", default=Endpoint.api_key)
    parser.add_argument("--concurrency", type=int, default=Endpoint.concurrency, help="conversations in flight")
    parser.add_argument("--return-token-ids", action="store_true", help="ask the server for token ids (vLLM)")
    for option in dataclasses.fields(AnswerConfig):
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=option.default)
        else:
            parser.add_argument(flag, type=type(option.default), default=option.default)
    arguments = parser.parse_args()
    if arguments.given and arguments.endpoint:
        parser.error("--given and --endpoint exclude each other")
    return arguments


def eos_ids_of(target: str, tokenizer: Any) -> set[int]:
    """End-of-sequence ids from the target's generation config, if it has one, and its tokenizer."""
    try:
        found = GenerationConfig.from_pretrained(target).eos_token_id
    except OSError:
        found = None
    ids = [*(found if isinstance(found, list) else [found]), tokenizer.eos_token_id]
    return {i for i in ids if i is not None}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # A polite kill writes the conversations that are finished, as an interrupt from the keyboard does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = parse_arguments()
    config = AnswerConfig(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(AnswerConfig)})
    sources = [PromptSource.parse(text) for text in arguments.prompts]
    prompts = mix_prompts(sources, seed=config.seed, max_broken=arguments.max_broken)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    if arguments.given:
        eos_ids = eos_ids_of(arguments.target, tokenizer)
        use_given_answers(tokenizer, prompts, arguments.output, config, eos_ids)
        return
    if arguments.endpoint:
        endpoint = Endpoint(
            arguments.endpoint,
            arguments.endpoint_model,
            arguments.api_key,
            concurrency=arguments.concurrency,
            return_token_ids=arguments.return_token_ids,
        )
        fetch_answers(endpoint, tokenizer, prompts, arguments.output, config, eos_ids_of(arguments.target, tokenizer))
        return
    dtype = default_dtype() if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=dtype).to(arguments.device).eval()
    generate_answers(model, tokenizer, prompts, arguments.output, config)


if __name__ == "__main__":
    main()
