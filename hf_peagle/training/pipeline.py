"""`train(config)`: answers, features, head, evaluation - every stage goes on where it was interrupted."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_peagle.configuration_peagle import default_target_layer_ids
from hf_peagle.files import write_text
from hf_peagle.modeling_peagle import PEagleDrafterModel

from .answers import AnswerConfig, default_dtype, generate_answers
from .batches import DocumentSource
from .config import TrainingConfig
from .features import Document, FeatureCache, TargetOutputs, build_cache, extract, read_documents
from .initialise import new_head
from .prompts import PromptSource, mix_prompts
from .trainer import Trainer
from .vocabulary import choose_vocabulary, count_tokens, coverage_of

logger = logging.getLogger(__name__)


class OnlineFeatures:
    """Documents of answer shards whose target outputs are made when they are asked for; nothing is stored."""

    def __init__(self, target: PreTrainedModel, files: list[Path], layer_ids: list[int], max_length: int) -> None:
        self.target, self.layer_ids = target, layer_ids
        self.documents = [d for path in files for d in read_documents(path, max_length)]

    def lengths(self) -> list[int]:
        """Tokens per document."""
        return [len(d) for d in self.documents]

    def load(self, index: int, max_length: int | None = None) -> tuple[Document, TargetOutputs]:
        """Document `index` and the target's outputs for it."""
        document = self.documents[index]
        if max_length is not None:
            document = Document(document.input_ids[:max_length], document.label[:max_length], document.source)
        out = extract(self.target, [document], self.layer_ids)[0]
        return document, TargetOutputs(*(p.cpu() for p in (out.streams, out.last_hidden, out.log_normaliser, out.top1)))


def load_target(config: TrainingConfig) -> PreTrainedModel:
    """The target in evaluation mode, in the configured dtype and on the configured device."""
    dtype = default_dtype() if config.target_dtype == "auto" else getattr(torch, config.target_dtype)
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype)
    return target.to(device).eval().requires_grad_(False)


def draft_vocabulary(config: TrainingConfig, target: PreTrainedModel, answers: Path) -> torch.Tensor:
    """`[draft_vocab_size]` int64: the draft vocabulary of the run; chosen once and kept in OUTPUT/vocabulary.json."""
    path = Path(config.output) / "vocabulary.json"
    if path.exists():
        return torch.tensor(json.loads(path.read_text(encoding="utf-8")), dtype=torch.long)
    vocab_size = target.config.get_text_config().vocab_size
    documents = [d for p in sorted(answers.glob("answers-*.jsonl")) for d in read_documents(p, config.max_length)]
    counts = count_tokens(documents, vocab_size)
    size = config.draft_vocab_size or vocab_size
    eos = target.generation_config.eos_token_id if target.generation_config is not None else None
    always = [eos] if isinstance(eos, int) else list(eos or [])
    token_ids = choose_vocabulary(counts, size=min(size, vocab_size), always=always)
    answered = count_tokens(documents, vocab_size, prompt_weight=0.0)
    logger.info("draft vocabulary: %d tokens cover %.2f %% of the answers", size, 100 * coverage_of(token_ids, answered))
    write_text(path, json.dumps(token_ids.tolist()))
    return token_ids


def make_answers(config: TrainingConfig, target: PreTrainedModel, folder: Path) -> None:
    """Lets the target answer the configured prompts, as far as it has not yet."""
    if not config.prompts:
        return
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    prompts = mix_prompts([PromptSource.parse(text) for text in config.prompts], seed=config.seed)
    generate_answers(target, tokenizer, prompts, folder, AnswerConfig(seed=config.seed))


def train(config: TrainingConfig) -> dict[str, Any]:
    """
    Runs all stages and returns the final evaluation. The finished head is in OUTPUT/head, the best one of all
    evaluations in OUTPUT/best, the log in OUTPUT/log.jsonl.
    """
    output = Path(config.output)
    answers = Path(config.answers) if config.answers else output / "answers"
    features = Path(config.features) if config.features else output / "features"
    accelerator = Accelerator(
        cpu=config.device == "cpu" or not torch.cuda.is_available(),
        mixed_precision="bf16" if config.bf16 else "no",
        log_with=config.tracker or None,
        project_dir=config.output,
    )
    if config.tracker:
        accelerator.init_trackers("peagle")
    target = load_target(config)
    num_layers = target.config.get_text_config().num_hidden_layers
    layer_ids = config.target_layer_ids or list(default_target_layer_ids(num_layers))
    stored_ids = [i for i in layer_ids if i != num_layers]
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            output.mkdir(parents=True, exist_ok=True)
            config.save(output / "training.json")
            make_answers(config, target, answers)
        token_ids = draft_vocabulary(config, target, answers)

    def cached(source: Path, folder: Path) -> None:
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                build_cache(
                    lambda: target,
                    source,
                    folder,
                    stored_ids,
                    config.max_length,
                    batch_tokens=config.feature_batch_tokens,
                )

    def open_source(files: list[str] | None) -> tuple[DocumentSource, list[str]]:
        if config.online_features:
            names = files or sorted(p.name for p in answers.glob("answers-*.jsonl"))
            return OnlineFeatures(target, [answers / n for n in names], layer_ids, config.max_length), names
        if files is None:
            cached(answers, features)
        source = FeatureCache(features, layer_ids, num_layers, files)
        return source, source.files

    if config.eval_answers:
        folder = Path(config.eval_answers) / "features"
        cached(Path(config.eval_answers), folder)
        held_out: DocumentSource = FeatureCache(folder, layer_ids, num_layers)
    else:
        held_out, _ = open_source(None)
    if config.init_from:
        head = PEagleDrafterModel.from_pretrained(config.init_from, dtype=torch.float32)
        if not torch.equal(head.draft_token_ids, token_ids):
            raise ValueError(f"init_from={config.init_from}: the head there has another draft vocabulary than this run")
        # What the head says about its training is this run's, not that of the run it starts from.
        head.config.num_depths = config.num_depths
        head.config.draft_length = min(config.draft_length, config.num_depths)
    else:
        head = new_head(target, config, token_ids)
    logger.info("%.2f M trained parameters", sum(p.numel() for p in head.parameters()) / 1e6)
    result = Trainer(config, head, target, open_source, held_out, accelerator).run()
    if config.tracker:
        accelerator.end_training()
    return result
