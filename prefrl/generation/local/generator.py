"""Generation in the training process, with the weights that are being trained.

A prompt is computed once for all its samples, whose rows then decode together with a KV cache of transformers. A
finished row leaves the batch. The rows of a batch are right-aligned, so shorter prompts are padded on the left with
copies of their first token, which are masked out. Legend: P prompts, R rows that decode together, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from prefrl import distributed
from prefrl.errors import ConfigError, GenerationError
from prefrl.generation.base import OnDemand
from prefrl.generation.local.decoding import (
    DistinctPrompt,
    SampleRow,
    StopStrings,
    TokenSampler,
    batches_of,
    keep_rows,
    packed_linears,
    routes_of_rows,
    rows_of_cache,
    sent,
    uniform_numbers,
)
from prefrl.generation.local.turns import LocalTurns, TurnRequest
from prefrl.models.adapters import is_peft_model
from prefrl.models.images import RowPositions, image_rules, placeholder_ids
from prefrl.models.modes import eval_mode
from prefrl.models.plans import position_limit
from prefrl.models.router_replay import ROUTES_KWARG
from prefrl.types import Completion

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from prefrl.generation.base import Pending, SamplingParams, WeightSource
    from prefrl.generation.local.decoding import Draw
    from prefrl.models.router_replay import RouterReplay
    from prefrl.types import FinishReason, Images


def in_space(positions: Tensor, places: Sequence[RowPositions | None]) -> Tensor:
    """[R, 4, W] the positions [R, W] of rows, and those in time, height and width below."""
    length = positions.size(1)
    columns = [
        row.expand(3, -1)
        if place is None
        else place.of(0, length).to(row.device, non_blocking=True)[:, row.clamp(min=0)]
        for row, place in zip(positions, places, strict=True)
    ]
    return torch.cat([positions[:, None], torch.stack(columns)], 1)


# Packing the weights takes about as long as five steps.
_STEPS_THAT_PAY_FOR_PACKING = 16


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The state after a batch of prompts, padded to W tokens."""

    cache: Cache
    logits: Tensor  # [P, V] float32, after the last token
    ids: Tensor  # [P, W] int64
    padding: Tensor  # [P] int64, number of padding tokens on the left
    has_padding: bool
    places: Sequence[RowPositions | None]  # [P] positions of prompts whose images have positions in space
    routes: Tensor | None = None  # [P, W, L, k] of all tokens; None: they are not recorded


class LocalGenerator:
    """A `prefrl.generation.base.Generator` that uses the weights of a model in this process.

    Args:
        model: The model that is trained, without the backend's wrapper; it may be a PeftModel.
        tokenizer: Its end-of-sequence token ends a sample, in addition to those of the model's generation config.
        max_rows: Maximum number of samples that decode together; it bounds the memory of the KV cache.
        gathers: Whether all weights of a partitioned model are gathered on each rank for the whole of generation;
            otherwise they are gathered layer by layer for each token.
        offloads_cache: Whether the KV cache is kept in host memory, except for the layer that is being computed.
        autocast: Context of each forward pass: the mixed precision of training, which accelerate adds to the model
            only when training starts.
        memory: Context of a generation, for which memory may not suffice; it is given words that describe it.
        replay: Of the model's routers, whose choices completions get; None: they are not recorded.

    Raises:
        ConfigError: `max_rows` is not positive.
        GenerationError: The architecture has no KV cache that can be used here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_rows: int = 64,
        gathers: bool = True,
        offloads_cache: bool = False,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        memory: Callable[[Callable[[], str]], AbstractContextManager[object]] = nullcontext,
        replay: RouterReplay | None = None,
    ) -> None:
        if max_rows < 1:
            raise ConfigError(f"max_rows={max_rows}: must be at least 1")
        self._model = model
        self._base = model.get_base_model() if is_peft_model(model) else model
        self._tokenizer = tokenizer
        self._max_rows = max_rows
        self._gathers = gathers
        self._offloads_cache = offloads_cache
        self._autocast = autocast
        self._memory = memory
        self._replay = replay
        self._routes: list[Tensor] = []  # [tokens, L, k] of the last forward pass
        self._version = 0
        self._arguments = frozenset(inspect.signature(type(self._base).forward).parameters)
        # The second name is that of transformers before 5.24, and of models that come with their own code.
        self._cache_name = "cache" if "cache" in self._arguments else "past_key_values"
        limit = position_limit(self._base)
        self._rules = image_rules(self._base)
        self._never = placeholder_ids(self._base)
        self._num_positions = limit.count if limit is not None and limit.is_table else None
        self._check_architecture()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        images: Sequence[Images | None] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """See `Generator`.

        A sample does not depend on the other samples, up to the rounding of matrix products of other shapes. The
        model's training modes and torch's global random state are unchanged afterward. `limits`, [P], are the most
        tokens of each prompt's completions; None: `sampling.max_tokens`.

        Raises:
            ValueError: The numbers of prompts, seeds and limits differ.
            GenerationError: A prompt is empty or too long for the model, or the model's logits are not finite.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: must be one seed for each prompt")
        limits = [sampling.max_tokens] * len(prompts) if limits is None else limits
        self._check_prompts(prompts, limits)
        completions: dict[SampleRow, Completion] = {}
        ends = () if sampling.ignores_eos else end_token_ids(self._base, self._tokenizer)
        stop_ids = {*sampling.stop_token_ids, *ends}
        stops = StopStrings(self._tokenizer, sampling.stop, prompts) if sampling.stop else None
        sampler = TokenSampler(sampling, never=self._never)
        most_tokens = max(limits, default=0)
        pays = most_tokens >= _STEPS_THAT_PAY_FOR_PACKING
        is_sharded = distributed.is_sharded(self._model)
        # FSDP2 reuses the memory of gathered weights for training, so they must not be inference tensors.
        no_grad = torch.no_grad() if is_sharded else torch.inference_mode()
        packs = pays and (self._gathers or not is_sharded)
        num_rows, longest = len(prompts) * sampling.num_samples, max(map(len, prompts), default=0)
        work = (
            f"generation of {num_rows} completions, {min(num_rows, self._max_rows)} at a time, of up to "
            f"{longest} + {most_tokens} tokens"
        )
        usable: AbstractContextManager[object] = nullcontext()
        if is_sharded and self._gathers:
            usable = distributed.full_params(self._model)
        elif is_sharded:
            usable = distributed.in_company([(self._model, self._idle)], self._base.device)
        with (
            self._memory(lambda: work),
            usable,
            no_grad,
            eval_mode(self._model),
            packed_linears(self._base) if packs else nullcontext(),
        ):
            if self._replay is not None:
                self._replay.prove(self._model)
            for batch in batches_of(prompts, images, sampling.num_samples, self._max_rows):
                prefill = self._prefill(list(batch))
                rows = [(number, row) for number, group in enumerate(batch.values()) for row in group]
                for start in range(0, len(rows), self._max_rows):
                    live = rows[start : start + self._max_rows]
                    wave = _Wave(prefill, live, seeds, limits, offloads_cache=self._offloads_cache)
                    self._decode(wave, sampler, stop_ids, stops)
                    completions |= wave.completions(self._version)
        return [
            [completions[SampleRow(request, sample)] for sample in range(sampling.num_samples)]
            for request in range(len(prompts))
        ]

    def _idle(self) -> None:
        """A forward pass that other ranks need this rank to take part in."""
        self._model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=self._base.device), use_cache=False)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        seeds: Sequence[int],
        images: Sequence[Images | None] | None = None,
    ) -> Pending[Completion]:
        """See `generate`, which runs when the completions are read."""
        return OnDemand(lambda: self.generate(prompts, sampling, seeds=seeds, images=images))

    def turns(self, sampling: SamplingParams) -> LocalTurns:
        """See `prefrl.generation.base.Generator`."""
        one = replace(sampling, num_samples=1)

        def generate(wave: Sequence[TurnRequest]) -> list[Completion]:
            prompts, seeds = [request.prompt for request in wave], [request.seed for request in wave]
            limits = [request.max_tokens for request in wave]
            return [completions[0] for completions in self.generate(prompts, one, seeds=seeds, limits=limits)]

        together = distributed.world_size() > 1 and distributed.is_sharded(self._model)
        device = self._base.device
        return LocalTurns(generate, (lambda n: int(distributed.sum_over_ranks([n], device)[0])) if together else None)

    def sync(self, weights: WeightSource, *, version: int) -> None:
        """Record the version of the weights. They are the model's own, so nothing is read from `weights`."""
        self._version = version

    def invalidate(self) -> None:
        """No-op: the weights are the model's own."""

    def close(self) -> None:
        """No-op: nothing is held between calls."""

    def _decode(self, wave: _Wave, sampler: TokenSampler, stop_ids: set[int], stops: StopStrings | None) -> None:
        logits = wave.first_logits
        for step in range(wave.max_tokens):
            place = wave.width + step  # of the token that is drawn
            history = wave.history[:, :place] if sampler.reads_history else None
            draw = sampler.draw(logits, wave.uniforms[:, step], history)
            # The only point in a step that waits for the device.
            drawn, is_valid = torch.stack([draw.tokens, draw.is_valid.long()]).tolist()
            if not all(is_valid):
                raise self._logits_error(wave.live_rows[is_valid.index(0)], step)
            reasons: list[FinishReason | None] = ["stop" if token in stop_ids else None for token in drawn]
            if stops is not None:
                for i, row in enumerate(wave.live_rows):
                    if reasons[i] is None and stops.is_complete(row.request, row.sample, drawn[i]):
                        reasons[i] = "stop_string"
            kept = wave.advance(step, draw, reasons)
            if not kept:
                return
            tokens = draw.tokens if len(kept) == len(drawn) else draw.tokens[sent(kept, draw.tokens.device)]
            mask = None if wave.mask is None else wave.mask[:, : place + 1]
            logits = self._forward(tokens[:, None], wave.cache, wave.positions[..., place, None], mask)
            wave.routes += self._routes

    def _prefill(self, prompts: list[DistinctPrompt]) -> _Prefill:
        width, device = max(len(prompt.ids) for prompt in prompts), self._base.device
        ids = [[prompt.ids[0]] * (width - len(prompt.ids)) + list(prompt.ids) for prompt in prompts]
        input_ids = sent(ids, device)
        left = [width - len(prompt.ids) for prompt in prompts]
        padding, has_padding = sent(left, device), any(left)
        columns = torch.arange(width, device=device)
        positions = (columns - padding[:, None]).clamp(min=0)
        mask = (columns >= padding[:, None]).long() if has_padding else None
        images = {}
        places: list[RowPositions | None] = [None] * len(prompts)
        found = [prompt.images for prompt in prompts if prompt.images is not None]
        if found and self._rules is not None:
            types = self._rules.types([prompt.images for prompt in prompts], width, starts=left)
            types = types.to(device, non_blocking=True)
            images = {**self._rules.join(found, device), **dict.fromkeys(self._rules.type_names, types)}
            if self._rules.rope_index is not None:
                rules = self._rules
                places = [None if p.images is None else rules.positions(p.images) for p in prompts]
                positions = in_space(positions, places)
        cache = DynamicCache(config=self._base.config)
        try:
            logits = self._forward(input_ids, cache, positions, mask, images)
        except ValueError as error:  # some architectures accept only their own kind of cache
            raise _no_cache_error(self._base, str(error)) from error
        routes = self._routes[0].view(*input_ids.shape, *self._routes[0].shape[1:]) if self._routes else None
        return _Prefill(cache, logits, input_ids, padding, has_padding, places, routes)

    def _forward(
        self,
        input_ids: Tensor,
        cache: Cache,
        positions: Tensor,
        mask: Tensor | None,
        images: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """[R, V] float32 logits after the last token of `input_ids`, whose keys and values are added to `cache`.

        Args:
            input_ids: [R, .] int64.
            cache: The cache of all previous tokens.
            positions: [R, .] int64, positions of `input_ids`; in space [R, 4, .], see `in_space`.
            mask: [R, .] int64, over all tokens so far, 0 for padding; None if there is no padding.
            images: What the model reads besides tokens.
        """
        arguments = {"input_ids": input_ids, "attention_mask": mask, self._cache_name: cache, "use_cache": True}
        arguments |= images or {}
        if "position_ids" in self._arguments:
            arguments["position_ids"] = positions if positions.dim() == 2 else positions.transpose(0, 1)
        if "logits_to_keep" in self._arguments:
            arguments["logits_to_keep"] = 1
        if "output_router_logits" in self._arguments:
            # transformers would compute the routers' loss, for which the mask has to be as long as the input.
            arguments["output_router_logits"] = False
        record = None if self._replay is None else self._replay.routes(None)
        if record is not None:
            arguments[ROUTES_KWARG] = record
        with self._autocast():
            output = self._model(**arguments)
        self._routes = [] if record is None else [record.recorded()]
        if output.get(self._cache_name) is not cache:
            raise _no_cache_error(self._base, "its forward pass does not fill the cache that is passed to it")
        return output.logits[:, -1].to(input_ids.device, torch.float32)  # type: ignore[no-any-return]  # untyped

    def _check_architecture(self) -> None:
        if self._base.config.is_encoder_decoder:
            raise _no_cache_error(self._base, "it is an encoder-decoder model")
        if self._cache_name not in self._arguments:
            raise _no_cache_error(self._base, "its forward pass takes no cache")
        if getattr(self._base, "_is_stateful", False) and "position_ids" not in self._arguments:
            raise _no_cache_error(self._base, "padding before a prompt would change its state")
        if is_peft_model(self._model) and self._model.active_peft_config.is_prompt_learning:
            kind = type(self._model.active_peft_config).__name__
            raise _no_cache_error(self._base, f"its adapter ({kind}) inserts its own tokens before the prompt")

    @property
    def context_limit(self) -> int | None:
        """See `Generator`."""
        return self._num_positions

    def _check_prompts(self, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
        for number, (prompt, max_tokens) in enumerate(zip(prompts, limits, strict=True)):
            if not prompt:
                raise GenerationError(f"prompt {number} is empty: must have at least one token")
            if self._num_positions is not None and len(prompt) + max_tokens > self._num_positions:
                raise GenerationError(
                    f"prompt {number} has {len(prompt)} tokens and max_tokens={max_tokens}: together must be at most "
                    f"{self._num_positions} for {type(self._base).__name__}, which has no further positions. Shorten "
                    "the prompts (max_prompt_length) or the completions (max_completion_length)."
                )

    def _logits_error(self, row: SampleRow, step: int) -> GenerationError:
        return GenerationError(
            f"prompt {row.request}, sample {row.sample}, token {step}: the logits of weight version {self._version} "
            "are NaN or infinite. The weights have diverged or overflowed: lower learning_rate or max_grad_norm, "
            "use bfloat16 instead of float16, and resume from a checkpoint before this version."
        )


class _Wave:
    """Rows that decode together: the tokens drawn for all of them, and the state of the live (unfinished) ones."""

    def __init__(
        self,
        prefill: _Prefill,
        rows: list[tuple[int, SampleRow]],
        seeds: Sequence[int],
        limits: Sequence[int],
        *,
        offloads_cache: bool,
    ) -> None:
        self._limits = [limits[row.request] for _, row in rows]
        self.max_tokens = max(self._limits)
        self._device, self.width = prefill.ids.device, prefill.ids.shape[1]
        self._rows = [row for _, row in rows]
        self._reasons: list[FinishReason] = ["length"] * len(rows)
        self._draws: list[Draw] = []
        self._drawn_for: list[list[int]] = []  # rows of each draw
        # State of the live rows, in the order of the cache.
        self._live = list(range(len(rows)))
        prompts = sent([number for number, _ in rows], self._device)
        # As many numbers as the row's own limit, so that they do not depend on the other rows.
        uniforms = [
            pad(uniform_numbers(seeds[row.request], row.sample, limit), (0, self.max_tokens - limit))
            for row, limit in zip(self._rows, self._limits, strict=True)
        ]
        self.uniforms = torch.stack(uniforms).to(self._device, non_blocking=True)  # [R, T] random numbers
        # [R, W + T] tokens. Padding repeats a prompt token, so the set of tokens is correct.
        self.history = pad(prefill.ids[prompts], (0, self.max_tokens))
        columns = torch.arange(self.width + self.max_tokens, device=self._device)
        padding = prefill.padding[prompts, None]
        self.positions = columns - padding  # [R, W + T], or [R, 4, W + T]
        if any(place is not None for place in prefill.places):
            self.positions = in_space(self.positions, [prefill.places[number] for number, _ in rows])
        self.mask = (columns >= padding).long() if prefill.has_padding else None  # [R, W + T]
        self.cache = rows_of_cache(prefill.cache, prompts, room=self.max_tokens, offloads=offloads_cache)
        self.first_logits = prefill.logits[prompts]
        # Of each row's prompt, and of the tokens of each step that were run; None and empty if they are not recorded.
        self._of_prompts: list[Tensor] | None = None
        self.routes: list[Tensor] = []
        if prefill.routes is not None:
            whole, left = prefill.routes.cpu(), prefill.padding.tolist()
            self._of_prompts = [whole[number, left[number] :] for number, _ in rows]

    @property
    def live_rows(self) -> list[SampleRow]:
        """The rows that are not finished."""
        return [self._rows[row] for row in self._live]

    def advance(self, step: int, draw: Draw, reasons: Sequence[FinishReason | None]) -> list[int]:
        """Store the tokens that were drawn, and remove rows that have stopped or reached their limit.

        Args:
            step: Number of tokens that each live row had before.
            draw: A token for each live row.
            reasons: Why live rows have stopped; None: they have not.
        Returns:
            The positions of the live rows that stay, in their new order.
        """
        self.history[:, self.width + step] = draw.tokens
        self._draws.append(draw)
        self._drawn_for.append(self._live)
        is_done = []
        for row, reason in zip(self._live, reasons, strict=True):
            self._reasons[row] = reason or "length"
            is_done.append(reason is not None or self._limits[row] == step + 1)
        # In an order that moves as few rows as possible: the last ones fill the gaps.
        num_kept = len(is_done) - sum(is_done)
        movers = (place for place in range(len(is_done) - 1, num_kept - 1, -1) if not is_done[place])
        kept = [next(movers) if is_done[place] else place for place in range(num_kept)]
        if kept and len(kept) < len(reasons):
            chosen = sent(kept, self._device)
            self._live = [self._live[place] for place in kept]
            self.uniforms, self.history, self.positions = (
                state[chosen] for state in (self.uniforms, self.history, self.positions)
            )
            self.mask = None if self.mask is None else self.mask[chosen]
            keep_rows(self.cache, kept, self._device)
        return kept

    def completions(self, version: int) -> dict[SampleRow, Completion]:
        """The completions of all rows, on the host."""
        tokens: list[list[int]] = [[] for _ in self._rows]
        logprobs: list[list[float]] = [[] for _ in self._rows]
        drawn = zip(
            chain.from_iterable(self._drawn_for),
            torch.cat([draw.tokens for draw in self._draws]).tolist(),
            torch.cat([draw.logprobs for draw in self._draws]).tolist(),
            strict=True,
        )
        for row, token, logprob in drawn:
            tokens[row].append(token)
            logprobs[row].append(logprob)
        routes: Sequence[Tensor | None] = [None] * len(tokens)
        if self._of_prompts is not None:
            routes = routes_of_rows(self._of_prompts, self.routes, self._drawn_for[1:], [len(ids) for ids in tokens])
        return {
            row: Completion(
                token_ids=tokens[number],
                finish_reason=self._reasons[number],
                logprobs=logprobs[number],
                trainable=[True] * len(tokens[number]),
                policy_versions=[version] * len(tokens[number]),
                routes=routes[number],
            )
            for number, row in enumerate(self._rows)
        }


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Tokens that end a completion: those of the model's generation config, and the tokenizer's."""
    of_config = model.generation_config.eos_token_id
    ids = {*(of_config if isinstance(of_config, (list, tuple)) else [of_config])}
    if tokenizer is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(ids - {None})


def _no_cache_error(model: PreTrainedModel, reason: str) -> GenerationError:
    return GenerationError(
        f"{type(model).__name__} cannot generate in this process: {reason}. Use a decoder with a key/value cache, or "
        "generate with vLLM."
    )
