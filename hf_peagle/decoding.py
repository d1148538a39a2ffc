"""
The decoding loop: prefill, then rounds of draft, verify, accept, commit.

`peagle_decode` has the signature of `GenerationMixin._assisted_decoding`, so that `generate()` prepares everything
(configuration, processors, criteria, masks, cache) exactly as for plain decoding and only the loop differs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from .compatibility import check_cache, check_pair, plain_decoding_reason
from .drafting import DraftState, align_left
from .features import FeatureCapture
from .recording import Recorder
from .sampling_noise import NoiseStream
from .speculation import affordable_draft_length, draft_length_policy
from .stats import SpeculationStats, Stopwatch, publish
from .stopping import Stopping
from .target_state import TargetState
from .token_buffer import TokenBuffer
from .verification import (
    Drafts,
    accept_choices,
    accept_sampled,
    is_position_independent,
    process_block,
    score_warpers,
)

logger = logging.getLogger(__name__)


@torch.no_grad()
def peagle_decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    inputs_tensor: torch.Tensor | None = None,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """
    Greedy decoding or sampling of `model` with drafts from the P-EAGLE head `assistant_model`. The arguments are those
    of `GenerationMixin._assisted_decoding`; the result is what `model` alone would return.

    Raises:
        ValueError: the head does not fit the target, or the target or its cache cannot be rolled back.
    """
    check_pair(model, assistant_model, generation_config, model_kwargs)
    if reason := plain_decoding_reason(synced_gpus, generation_config):
        logger.warning("P-EAGLE drafting is off for this call: %s. Decoding without drafts.", reason)
        plain_decoding = model._beam_search if generation_config.num_beams > 1 else model._sample
        return plain_decoding(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
    capture = FeatureCapture(
        model,
        assistant_model.config.target_layer_ids,
        all_states=bool(generation_config.output_hidden_states),
        chunked_prefill=generation_config.prefill_chunk_size is not None,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(capture.active())
        call = _Call(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            assistant_model,
            capture,
            stack,
            model_kwargs,
        )
        call.prefill()
        with call.target.decoding():
            while not call.is_done:
                call.round()
    return call.finish()


class _Call:
    """State of one generate() call. Nothing of it stays on the target or the head."""

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any,
        head: Any,
        capture: FeatureCapture,
        stack: contextlib.ExitStack,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.clock = Stopwatch(model.device)
        self.stats = SpeculationStats()
        self.config = generation_config
        self.processors = logits_processor
        self.streamer = streamer
        self.capture = capture
        self.device = input_ids.device
        self.batch_size, self.prompt_width = input_ids.shape
        self.stopping = Stopping(stopping_criteria, generation_config.max_length)
        self.prompt_embeds = model_kwargs.get("inputs_embeds") is not None
        self.target = TargetState(model, input_ids, generation_config, model_kwargs, capture)
        self.samples_drafts = generation_config.do_sample and head.config.draft_sampling == "probabilistic"
        warpers = score_warpers(logits_processor) if self.samples_drafts else None
        draws_noise = generation_config.do_sample and not self.samples_drafts
        self.noise = NoiseStream(self.batch_size, self.device) if draws_noise else None
        self.recorder = Recorder(generation_config, self.batch_size)
        self.processors_run_ahead = is_position_independent(logits_processor)
        self.advance_together = self._must_advance_together()
        self.policy = draft_length_policy(model, head, generation_config, self.batch_size, self.advance_together, fixed=self.samples_drafts)
        room = max(self.stopping.max_length, self.prompt_width + 1) + self.policy.longest + 1
        self.tokens = TokenBuffer(input_ids, room)
        self.drafter = DraftState(head, model, self.batch_size, room + self.policy.longest, stack, warpers)
        self._no_drafts = Drafts(input_ids.new_zeros(self.batch_size, 0))
        self.finished = [False] * self.batch_size
        pad = getattr(generation_config, "_pad_token_tensor", None)
        self.pad_id = int(pad) if pad is not None else 0

    @property
    def is_done(self) -> bool:
        """Whether every row is finished."""
        return all(self.finished)

    def _must_advance_together(self) -> bool:
        """
        Whether the rows of the batch advance by the same number of tokens, position by position, as in plain decoding.

        That is how processors, criteria and streamers that we cannot judge row by row see exactly the calls they
        would see without drafts.
        """
        if not self.processors_run_ahead or not self.stopping.row_wise:
            return True
        if self.batch_size == 1:
            return False
        finished_rows_go_on = bool(self.stopping.asked) and not self.stopping.has_eos
        return self.streamer is not None or finished_rows_go_on or not self.target.can_move_rows

    # ------------------------------------------------------------------ rounds

    def prefill(self) -> None:
        """Runs the prompt and commits the first token."""
        with self.clock.section("prefill"):
            outputs = self.target.prefill()
            check_cache(self.target.model, self.target.cache)
            features = self.capture.take(outputs, self.drafter.device)
        self.stats.target_forwards += 1
        self.recorder.prefill(outputs)
        logits = self._logits(outputs, 1)
        del outputs
        self._commit(logits, self._no_drafts)
        if self.policy.longest:
            self._feed_prompt(features)

    def round(self) -> None:
        """One round: draft, verify, accept, commit."""
        began = time.perf_counter()
        active = [not done for done in self.finished]
        length = affordable_draft_length(self.policy.choose(), self._remaining())
        drafts = self._no_drafts
        if length > 0:
            with self.clock.section("draft"):
                drafts = self.drafter.propose(length)
                drafts.tokens = drafts.tokens.to(self.device)
            self.stats.draft_forwards += 1
            self.tokens.write(drafts.tokens)
        start = list(self.tokens.lengths)
        with self.clock.section("verify"):
            block = self.tokens.read([n - 1 for n in start], length + 1)
            outputs, features = self.target.verify(block, self.drafter.device)
        self.stats.target_forwards += 1
        counts = self._commit(self._logits(outputs, length + 1), drafts, outputs)
        del outputs
        self.target.keep(self._columns_to_keep(counts), length + 1)
        if self.policy.longest:  # else nobody would ever take what is fed
            self.drafter.feed(self.tokens.read(start, max(counts)), features, counts)
        accepted = [count - 1 for count, was_active in zip(counts, active, strict=True) if was_active]
        self.policy.observe(length, accepted, time.perf_counter() - began)

    def _remaining(self) -> int:
        """Tokens that still fit into the row that needs most."""
        active = [n for n, done in zip(self.tokens.lengths, self.finished, strict=True) if not done]
        return self.stopping.max_length - min(active)

    def _logits(self, outputs: Any, q: int) -> torch.Tensor:
        """The last `q` rows in float32, as plain decoding has them; a copy where raw logits are to be returned."""
        logits = outputs.logits[:, -q:].to(self.device, torch.float32)
        return logits.clone() if self.recorder.wants_logits and len(self.processors) else logits

    def _columns_to_keep(self, counts: list[int]) -> list[int]:
        """A finished row needs no more columns, unless rows move together."""
        return [max(counts)] * self.batch_size if self.advance_together else counts

    def _feed_prompt(self, features: torch.Tensor) -> None:
        """Slot j pairs the feature at j with the token at j + 1: the prompt shifted by one, then the first new token."""
        n = features.shape[1]
        ids = self.tokens.data[:, : self.prompt_width + 1]
        if self.prompt_embeds and ids.shape[1] <= n:
            # A prompt of embeddings has no ids for its slots; only the last one is followed by a known token.
            n = ids.shape[1] - 1 if ids.shape[1] > 1 else 1
            features = features[:, -n:]
        slots = ids[:, -n:]
        if self.target.mask is None:
            self.drafter.feed(slots, features, [n] * self.batch_size)
            return
        valid = self.target.mask[:, -n:].bool().to(features.device)
        slots, features = align_left(valid, slots.to(features.device), features)
        self.drafter.feed(slots, features, valid.sum(dim=1).tolist())

    # ------------------------------------------------------------------ accepting

    def _commit(self, logits: torch.Tensor, drafts: Drafts, outputs: Any = None) -> list[int]:
        """Accepts drafts, writes the committed tokens, and returns how many each row got (0 for a finished row)."""
        before = self.tokens.lengths[0]
        was_finished = list(self.finished)
        if self.advance_together:
            counts = self._commit_together(logits, drafts)
        else:
            counts = self._commit_rows(logits, drafts)
        for b, count in enumerate(counts):
            if was_finished[b] and (self.stopping.has_eos or not self.advance_together):
                continue
            if outputs is not None:
                self.stats.rounds.append((drafts.length, count - 1))
                self.recorder.forward(b, count, outputs, self.target, drafts.length + 1)
            self.stats.generated_tokens += count
        if self.streamer is not None and (run := max(counts)):
            self.streamer.put(self.tokens.data[:, before : before + run].cpu())
        return counts

    def _commit_rows(self, logits: torch.Tensor, drafts: Drafts) -> list[int]:
        """All positions judged at once on the device, one read, then every row on its own."""
        scores = process_block(self.processors, self.tokens.data, self.tokens.lengths, logits)
        accepted, tokens = self._accept(scores, drafts)
        report = torch.cat([accepted[:, None], tokens], dim=1).tolist()
        self.stats.host_reads += 1
        self.tokens.write(tokens)
        counts = []
        for b, (n, *run) in enumerate(report):
            if self.finished[b]:
                counts.append(0)
                continue
            count, self.finished[b] = self.stopping.cut(self.tokens.data[b], self.tokens.lengths[b], run[: n + 1])
            self.recorder.tokens(b, count, scores[b], logits[b])
            self.tokens.lengths[b] += count
            counts.append(count)
        return counts

    def _commit_together(self, logits: torch.Tensor, drafts: Drafts) -> list[int]:
        """
        Position by position, with the very calls of plain decoding: processors and criteria see every prefix once and
        only prefixes that are really generated. Stops at the first position where an unfinished row leaves its draft.
        """
        start = self.tokens.lengths[0]
        count = 0
        while True:
            end = start + count
            self.tokens.lengths = [end] * self.batch_size
            self.tokens.reserve(end + 1)
            scores = self.processors(self.tokens.data[:, :end], logits[:, count])
            tokens, agrees = self._accept_one(scores, drafts.at(count))
            done = torch.tensor(self.finished, device=self.device)
            if self.stopping.has_eos:
                tokens = torch.where(done, self.pad_id, tokens)
            self.tokens.data[:, end] = tokens
            for b in range(self.batch_size):
                if not self.finished[b] or not self.stopping.has_eos:
                    self.recorder.tokens(b, 1, scores[b : b + 1], logits[b, count : count + 1])
            count += 1
            ended = done | self.stopping.criteria(self.tokens.data[:, : end + 1], self.recorder.scores_so_far())
            # A finished row is padded and needs no agreement; without an end token it goes on like the others.
            agrees = agrees | (ended & self.stopping.has_eos) if count <= drafts.length else torch.zeros_like(ended)
            report = torch.stack([ended, agrees]).tolist()
            self.stats.host_reads += 1
            self.finished = [bool(x) for x in report[0]]
            self.tokens.lengths = [end + 1] * self.batch_size
            if self.is_done or not all(report[1]):
                return [count] * self.batch_size

    def _accept(self, scores: torch.Tensor, drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted drafts per row and the tokens: greedy, sampled with plain sampling's own noise, or by rejection."""
        if self.samples_drafts:
            return accept_sampled(scores, drafts)
        return accept_choices(self._choose(scores), drafts)

    def _accept_one(self, scores: torch.Tensor, draft: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
        """One position alone, `[batch, vocab]`: the tokens, and in which rows they are the draft (if there is one)."""
        if self.samples_drafts:
            # A row of scores more than drafts is expected; it is not looked at.
            accepted, tokens = accept_sampled(scores[:, None].expand(-1, draft.length + 1, -1), draft)
            return tokens[:, 0], accepted > 0
        tokens = self._choose(scores[:, None])[:, 0]
        return tokens, (tokens[:, None] == draft.tokens).any(dim=1)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The target's own tokens `[batch, q]` for scores `[batch, q, vocab]` of the next `q` positions."""
        if self.noise is None:
            return scores.argmax(dim=-1)
        starts = [length - self.prompt_width for length in self.tokens.lengths]
        noise = self.noise.block(starts, scores.shape[1], scores.shape[2])
        return (scores.softmax(dim=-1) / noise).argmax(dim=-1)

    # ------------------------------------------------------------------ the end

    def finish(self) -> GenerateDecoderOnlyOutput | torch.Tensor:
        """Pads short rows, leaves the cache as plain decoding does, and builds the output."""
        width = max(self.tokens.lengths)
        columns = torch.arange(width, device=self.device)
        ends = torch.tensor(self.tokens.lengths, device=self.device)[:, None]
        sequences = torch.where(columns < ends, self.tokens.data[:, :width], self.pad_id)
        if self.streamer is not None:
            self.streamer.end()
        if not self.advance_together and self.batch_size > 1:
            self.target.restore_layout(width - self.prompt_width)
        if self.noise is not None:
            self.noise.close(width - self.prompt_width)
        self.target.close()
        self.stats.draft_graph, self.stats.verify_graph = self.drafter.graph_note, self.target.graph_note
        self.stats.seconds = self.clock.totals()
        publish(self.stats)
        if not self.config.return_dict_in_generate:
            return sequences
        output = GenerateDecoderOnlyOutput(sequences=sequences, **{self.target.cache_name: self.target.cache}, **self.recorder.result())
        output.speculation = self.stats
        return output
