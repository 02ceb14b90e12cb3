"""Sampling in this process, with the weights that are being trained.

A prompt is computed once for all its samples, whose rows then decode together over transformers' key/value cache. A
row that is finished leaves the batch. Rows of one batch are aligned at their end, so shorter prompts have padding on
their left: copies of their first token, masked out. Legend: P prompts, R rows that decode together, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.sampling import TokenSampler, uniform_numbers
from prefrl.models.adapters import is_peft_model
from prefrl.models.modes import eval_mode
from prefrl.types import Completion

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import CacheLayerMixin

    from prefrl.generation.base import SamplingParams, WeightSource
    from prefrl.types import FinishReason

__all__ = ["LocalGenerator"]


@dataclass(frozen=True, slots=True)
class _Row:
    """Sample `sample` of the prompt at `request` in the call."""

    request: int
    sample: int


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Prompts that were computed together, W tokens wide."""

    cache: Cache
    logits: Tensor  # [P, V] float32, after the last token
    ids: Tensor  # [P, W] int64
    padding: Tensor  # [P] int64, tokens of padding on the left


class LocalGenerator:
    """`prefrl.generation.base.Generator` with the weights of a model in this process.

    Args:
        model: The model that is trained, without what a back-end puts around it; may be a PeftModel.
        tokenizer: Its end-of-sequence token stops a sample, besides those of the model's generation config.
        max_rows: Samples that decode together at most; bounds the memory of the key/value cache.

    Raises:
        ConfigError: `max_rows` is not positive.
        GenerationError: The architecture has no key/value cache that can be used here.
    """

    def __init__(
        self, model: PreTrainedModel, *, tokenizer: PreTrainedTokenizerBase | None = None, max_rows: int = 64
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows={max_rows}: must be at least 1")
        self._model = model
        self._base = model.get_base_model() if is_peft_model(model) else model
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._version = 0
        self._arguments = frozenset(inspect.signature(type(self._base).forward).parameters)
        self._position_limit = _position_limit(self._base)
        self._check_architecture()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Draw `sampling.num_samples` completions of each prompt.

        A sample does not depend on what else is drawn, up to the rounding of matrix products of another shape. The
        model's modes and torch's global random state stay as they are.

        Args:
            prompts: [P] token ids.
            sampling: How to draw.
            seeds: [P], one of each prompt.

        Returns:
            [P][G] completions; a stop token is the last token of its completion.

        Raises:
            ValueError: The numbers of prompts and seeds differ.
            GenerationError: A prompt is empty or too long for the model, or the model's logits are not finite.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: one each is needed")
        self._check_prompts(prompts, sampling.max_tokens)
        completions: dict[_Row, Completion] = {}
        with torch.inference_mode(), eval_mode(self._model):
            for batch in _batches(prompts, sampling.num_samples, self._max_rows):
                prefill = self._prefill(list(batch))
                rows = [(number, row) for number, group in enumerate(batch.values()) for row in group]
                for start in range(0, len(rows), self._max_rows):
                    wave = _Wave(prefill, rows[start : start + self._max_rows], sampling, seeds)
                    self._decode(wave, sampling)
                    completions |= wave.completions(self._version)
        return [
            [completions[_Row(request, sample)] for sample in range(sampling.num_samples)]
            for request in range(len(prompts))
        ]

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Note the version of the weights. They are the model's own, so nothing is read from `weights`."""
        self._version = version

    def close(self) -> None:
        """No-op: nothing is held between calls."""

    def _decode(self, wave: _Wave, sampling: SamplingParams) -> None:
        sampler, stop_ids = TokenSampler(sampling), self._stop_ids(sampling)
        logits = wave.first_logits
        for step in range(sampling.max_tokens):
            draw = sampler.draw(logits, wave.uniforms(step), wave.history(step) if sampler.reads_history else None)
            stopped = torch.isin(draw.tokens, stop_ids)
            # The one place in a step that waits for the device.
            has_stopped, is_valid = torch.stack([stopped, draw.is_valid]).tolist()
            if not all(is_valid):
                raise self._logits_error(wave.live_rows[is_valid.index(False)], step)
            wave.record(step, draw.tokens, draw.logprobs)
            kept = wave.leave(step, has_stopped)
            if not kept or step + 1 == sampling.max_tokens:
                return
            tokens = draw.tokens if len(kept) == len(has_stopped) else draw.tokens[kept]
            logits = self._forward(tokens[:, None], wave.padding, wave.cache, past=wave.width + step)

    def _prefill(self, prompts: list[tuple[int, ...]]) -> _Prefill:
        width, device = max(map(len, prompts)), self._base.device
        ids = [[prompt[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        input_ids = torch.tensor(ids, device=device)
        padding = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
        cache = DynamicCache(config=self._base.config)
        try:
            logits = self._forward(input_ids, padding, cache, past=0)
        except ValueError as error:  # some architectures refuse a cache that is not of their own kind
            raise _no_cache_error(self._base, str(error)) from error
        return _Prefill(cache, logits, input_ids, padding)

    def _forward(self, input_ids: Tensor, padding: Tensor, cache: Cache, *, past: int) -> Tensor:
        """[R, V] float32 logits after the last of `input_ids` [R, .], whose keys and values go to `cache`."""
        columns = torch.arange(past + input_ids.shape[1], device=input_ids.device)
        arguments = {
            "input_ids": input_ids,
            "attention_mask": (columns >= padding[:, None]).long(),
            "past_key_values": cache,
            "use_cache": True,
        }
        if "position_ids" in self._arguments:
            arguments["position_ids"] = (columns[past:] - padding[:, None]).clamp(min=0)
        if "logits_to_keep" in self._arguments:
            arguments["logits_to_keep"] = 1
        output = self._model(**arguments)
        if output.get("past_key_values") is not cache:
            raise _no_cache_error(self._base, "its forward pass does not fill the cache that it is given")
        return output.logits[:, -1].to(input_ids.device, torch.float32)  # type: ignore[no-any-return]  # untyped

    def _stop_ids(self, sampling: SamplingParams) -> Tensor:
        of_config = self._base.generation_config.eos_token_id
        ids = {*sampling.stop_token_ids, *(of_config if isinstance(of_config, (list, tuple)) else [of_config])}
        if self._tokenizer is not None:
            ids.add(self._tokenizer.eos_token_id)
        return torch.tensor(sorted(ids - {None}), dtype=torch.long, device=self._base.device)

    def _check_architecture(self) -> None:
        if self._base.config.is_encoder_decoder:
            raise _no_cache_error(self._base, "it is an encoder with a decoder")
        if "past_key_values" not in self._arguments:
            raise _no_cache_error(self._base, "its forward pass takes no past_key_values")
        if is_peft_model(self._model) and self._model.active_peft_config.is_prompt_learning:
            kind = type(self._model.active_peft_config).__name__
            raise _no_cache_error(self._base, f"its adapter ({kind}) puts tokens of its own before the prompt")

    def _check_prompts(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        for number, prompt in enumerate(prompts):
            if not prompt:
                raise GenerationError(f"prompt {number} is empty: a first token is sampled after at least one token")
            if self._position_limit is not None and len(prompt) + max_tokens > self._position_limit:
                raise GenerationError(
                    f"prompt {number} has {len(prompt)} tokens and max_tokens={max_tokens}: together at most "
                    f"{self._position_limit} for {type(self._base).__name__}, which has no more positions. Shorten "
                    "the prompts (max_prompt_length) or the completions (max_completion_length)."
                )

    def _logits_error(self, row: _Row, step: int) -> GenerationError:
        return GenerationError(
            f"prompt {row.request}, sample {row.sample}, token {step}: the logits of weight version {self._version} "
            "are NaN or infinite. The weights have diverged or overflowed: lower learning_rate or max_grad_norm, use "
            "bfloat16 instead of float16, and restart from a checkpoint before this version."
        )


class _Wave:
    """Rows that decode together: what was drawn for all of them, and what the next step needs of the live ones."""

    def __init__(
        self, prefill: _Prefill, rows: list[tuple[int, _Row]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> None:
        device = prefill.ids.device
        uniforms = [uniform_numbers(seeds[row.request], row.sample, sampling.max_tokens) for _, row in rows]
        self._rows = [row for _, row in rows]
        self._uniforms = torch.stack(uniforms).to(device)  # [R, T]
        self._tokens = torch.zeros(self._uniforms.shape, dtype=torch.long, device=device)  # [R, T]
        self._logprobs = torch.zeros(self._uniforms.shape, device=device)  # [R, T]
        self._ends: list[tuple[int, FinishReason]] = [(sampling.max_tokens, "length")] * len(rows)
        self._prefill_ids = prefill.ids
        self.width = prefill.ids.shape[1]
        # Of live rows, in the order of the cache.
        self._live = list(range(len(rows)))
        self._live_index = torch.arange(len(rows), device=device)
        self._prompts = torch.tensor([number for number, _ in rows], device=device)
        self.padding = prefill.padding[self._prompts]
        self.cache = _rows_of_cache(prefill.cache, self._prompts, room=sampling.max_tokens)
        self.first_logits = prefill.logits[self._prompts]

    @property
    def live_rows(self) -> list[_Row]:
        """The rows that are not finished."""
        return [self._rows[row] for row in self._live]

    def uniforms(self, step: int) -> Tensor:
        """The random number of each live row."""
        return self._uniforms[self._live_index, step]

    def history(self, step: int) -> Tensor:
        """[., W + step] the tokens of live rows; padding repeats a token of the prompt, so the set is right."""
        return torch.cat([self._prefill_ids[self._prompts], self._tokens[self._live_index, :step]], dim=1)

    def record(self, step: int, tokens: Tensor, logprobs: Tensor) -> None:
        """Keep what was drawn for the live rows."""
        self._tokens[self._live_index, step] = tokens
        self._logprobs[self._live_index, step] = logprobs

    def leave(self, step: int, has_stopped: list[bool]) -> list[int]:
        """Let stopped rows go; returns which of the live rows stay, in their new order."""
        for row, is_last in zip(self._live, has_stopped, strict=True):
            if is_last:
                self._ends[row] = (step + 1, "stop")
        kept = [position for position, is_last in enumerate(has_stopped) if not is_last]
        if kept and len(kept) < len(has_stopped):
            chosen = torch.tensor(kept, device=self._live_index.device)
            self._live = [self._live[position] for position in kept]
            self._live_index, self._prompts = self._live_index[chosen], self._prompts[chosen]
            self.padding = self.padding[chosen]
            self.cache.reorder_cache(chosen)
        return kept

    def completions(self, version: int) -> dict[_Row, Completion]:
        """What was drawn, on the host."""
        tokens, logprobs = self._tokens.tolist(), self._logprobs.tolist()
        return {
            row: Completion(
                token_ids=tokens[number][:length],
                finish_reason=reason,
                logprobs=logprobs[number][:length],
                trainable=[True] * length,
                policy_versions=[version] * length,
            )
            for number, (row, (length, reason)) in enumerate(zip(self._rows, self._ends, strict=True))
        }


class _RoomyLayer(DynamicLayer):
    """A layer's keys and values in memory that has room for all tokens to come: a new token is written in place.

    `DynamicLayer` copies the whole layer for every token.
    """

    def __init__(self, filled: DynamicLayer, rows: Tensor, room: int) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self._length = filled.get_seq_length()
        self._key_room, self._value_room = (_with_room(state, rows, room) for state in (filled.keys, filled.values))
        self._show()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens behind those that are here; returns all."""
        end = self._length + key_states.shape[-2]
        self._key_room[:, :, self._length : end] = key_states
        self._value_room[:, :, self._length : end] = value_states
        self._length = end
        self._show()
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Only some rows stay; those of `beam_idx`, in that order."""
        for name in ("_key_room", "_value_room"):
            room = getattr(self, name)
            kept = room[: len(beam_idx)]
            kept[:, :, : self._length] = room[beam_idx, :, : self._length]
            setattr(self, name, kept)
        self._show()

    def _show(self) -> None:
        self.keys, self.values = (room[:, :, : self._length] for room in (self._key_room, self._value_room))


def _with_room(state: Tensor, rows: Tensor, room: int) -> Tensor:
    _, heads, length, size = state.shape
    roomy = state.new_empty(len(rows), heads, length + room, size)
    roomy[:, :, :length] = state[rows]
    return roomy


def _batches(
    prompts: Sequence[Sequence[int]], num_samples: int, max_rows: int
) -> list[dict[tuple[int, ...], list[_Row]]]:
    """Distinct prompts with their rows, of about equal length in a batch, at most `max_rows` rows or one prompt."""
    rows: dict[tuple[int, ...], list[_Row]] = {}
    for request, prompt in enumerate(prompts):
        rows.setdefault(tuple(prompt), []).extend(_Row(request, sample) for sample in range(num_samples))
    batches: list[dict[tuple[int, ...], list[_Row]]] = []
    num_rows = max_rows
    for prompt in sorted(rows, key=len):
        if num_rows + len(rows[prompt]) > max_rows:
            batches.append({})
            num_rows = 0
        batches[-1][prompt] = rows[prompt]
        num_rows += len(rows[prompt])
    return batches


def _rows_of_cache(cache: Cache, rows: Tensor, *, room: int) -> Cache:
    """A cache with copies of some rows, which may repeat, and room for more tokens; the original stays as it is."""
    copied = copy.copy(cache)
    # Layers of other kinds (sliding windows, recurrent states) have a bounded size and know how to select rows.
    copied.layers = [
        _RoomyLayer(layer, rows, room) if type(layer) is DynamicLayer else _rows_of_layer(layer, rows)
        for layer in cache.layers
    ]
    return copied


def _rows_of_layer(layer: CacheLayerMixin, rows: Tensor) -> CacheLayerMixin:
    copied = copy.copy(layer)
    copied.reorder_cache(rows)
    return copied


def _position_limit(model: PreTrainedModel) -> int | None:
    """The number of positions of a model that looks them up in a table; None if it computes them."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is None:
        return None
    tokens = model.get_input_embeddings().weight
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not tokens]
    tables += [buffer for buffer in model.buffers() if buffer.dim() == 2]
    # OPT and its kin keep two rows for padding.
    return limit if any(limit <= len(table) <= limit + 2 for table in tables) else None


def _no_cache_error(model: PreTrainedModel, reason: str) -> GenerationError:
    return GenerationError(
        f"{type(model).__name__} cannot generate in this process: {reason}. Use a decoder with a key/value cache, or "
        "generate with vLLM."
    )
