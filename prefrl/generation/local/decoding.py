"""What decoding stands on: batches of rows, a KV cache with room for all tokens, the choice of a token, fast layers.

The cache copies prompts to the rows that continue them. A token and its log-prob are sampled from logits, with random
numbers that depend only on the sample. Stop strings are looked for as a completion grows. Legend: B rows that are
sampled together, V vocabulary.

Fast layers are for a CPU. When each row decodes one token, a matrix product has only a few rows. With fp32 weights in
PyTorch's layout, it takes longer than reading the weights would. With the weights in oneDNN's own layout, it takes a
third to a half of the time (8 rows, 8192 x 256: 1.9 -> 0.5 ms; 32 rows, 32000 x 512: 24 -> 13 ms), and never more.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from prefrl.errors import ConfigError
from prefrl.losses.truncation import cumsum_permitted
from prefrl.models.scoring import HEAD_FORWARD

if TYPE_CHECKING:
    from transformers import Cache, LogitsProcessor, PreTrainedTokenizerBase
    from transformers.cache_utils import CacheLayerMixin

    from prefrl.generation.base import SamplingParams
    from prefrl.types import Images


def rows_of_cache(cache: Cache, rows: Tensor, *, room: int, offloads: bool = False) -> Cache:
    """A cache with copies of some rows, which may repeat, and room for more tokens; the original is unchanged.

    Args:
        cache: The cache of the prompts.
        rows: [R] int64, positions in `cache`.
        room: Number of tokens to come in each row.
        offloads: Whether to keep the copies in host memory.
    """
    filled = copy.copy(cache)
    # Layers of other kinds (sliding windows, recurrent states) have a bounded size and can select rows themselves.
    filled.layers = [
        _RoomyLayer(layer, rows, room, offloads=offloads)
        if type(layer) is DynamicLayer
        else _rows_of_layer(layer, rows)
        for layer in cache.layers
    ]
    return filled


def sent(values: Sequence[object], device: torch.device) -> Tensor:
    """The values as a tensor of the device, for which the host does not wait."""
    return torch.tensor(values).to(device, non_blocking=True)


def keep_rows(cache: Cache, rows: Sequence[int], device: torch.device) -> None:
    """Keep only `rows`, in this order. A row that moves must come from behind all positions that remain."""
    index = sent(rows, device)
    for layer in cache.layers:
        if isinstance(layer, _RoomyLayer):
            layer.keep(rows)
        else:
            layer.reorder_cache(index)


class _RoomyLayer(DynamicLayer):
    """A layer's keys and values, with memory allocated for all tokens to come: new tokens are written in place.

    `DynamicLayer` copies the whole layer for every token. With offloading, the memory is on the host, and only what
    `update` returns is on the device.
    """

    def __init__(self, filled: DynamicLayer, rows: Tensor, room: int, *, offloads: bool) -> None:
        super().__init__()
        self.lazy_initialization(filled.keys, filled.values)
        self._length = filled.get_seq_length()
        device = torch.device("cpu") if offloads else filled.keys.device
        rooms = []
        for state in (filled.keys, filled.values):
            _, heads, length, size = state.shape
            roomy = state.new_empty(len(rows), heads, length + room, size, device=device)
            roomy[:, :, :length] = state[rows]
            rooms.append(roomy)
        self._key_room, self._value_room = rooms
        self._show()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; returns those of all tokens."""
        end = self._length + key_states.shape[-2]
        self._key_room[:, :, self._length : end] = key_states
        self._value_room[:, :, self._length : end] = value_states
        self._length = end
        self._show()
        return self.keys.to(key_states.device), self.values.to(value_states.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only `rows`; those that move are copied."""
        for room in (self._key_room, self._value_room):
            for place, row in enumerate(rows):
                if place != row:
                    room[place, :, : self._length] = room[row, :, : self._length]
        self._key_room, self._value_room = self._key_room[: len(rows)], self._value_room[: len(rows)]
        self._show()

    def _show(self) -> None:
        self.keys = self._key_room[:, :, : self._length]
        self.values = self._value_room[:, :, : self._length]


def _rows_of_layer(layer: CacheLayerMixin, rows: Tensor) -> CacheLayerMixin:
    copied = copy.copy(layer)
    # Recurrent states are in dictionaries, which the copy would share.
    vars(copied).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    copied.reorder_cache(rows)
    return copied


# Number of tokens whose probabilities are summed in float32.
_BLOCK = 128
_BELOW_ONE = 1 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Draw:
    """One token for each row."""

    tokens: Tensor  # [B] int64
    logprobs: Tensor  # [B] float32, nats
    is_valid: Tensor  # [B] bool: False if the logits do not define a distribution (NaN, infinity)


def uniform_numbers(seed: int, sample: int, count: int) -> Tensor:
    """[count] float64 numbers in [0, 1) for one sample of a prompt; they depend only on the arguments.

    Args:
        seed: Seed of the prompt.
        sample: Number of the sample among those of the prompt.
        count: Maximum number of tokens.
    """
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.rand(count, generator=generator, dtype=torch.float64)


class TokenSampler:
    """Samples tokens by inverting the cumulative distribution, after the logits processors of transformers."""

    def __init__(self, sampling: SamplingParams, *, never: Sequence[int] = ()) -> None:
        """Tokens in `never` are not drawn; log-probs do not count this, because their probability is about 0."""
        self._never = list(never)
        self._is_greedy = sampling.temperature == 0
        self._wants_raw = sampling.logprobs == "raw"
        self.reads_history = sampling.repetition_penalty != 1.0
        # In vLLM's order, which `losses.truncation` follows, too: transformers' generate applies min_p last.
        self._processors: list[LogitsProcessor] = []
        if self.reads_history:
            self._processors.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
        if self._is_greedy:
            return
        if sampling.temperature != 1.0:
            self._processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.min_p:
            self._processors.append(MinPLogitsWarper(sampling.min_p))
        if sampling.top_k:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._processors.append(TopPLogitsWarper(sampling.top_p))

    def draw(self, logits: Tensor, uniforms: Tensor, history: Tensor | None) -> Draw:
        """Draw a token for each row.

        Args:
            logits: [B, V] float32.
            uniforms: [B] float64 in [0, 1); not used for greedy decoding.
            history: [B, .] int64, tokens so far; required if `reads_history`.
        """
        with cumsum_permitted() if torch.are_deterministic_algorithms_enabled() else nullcontext():
            scores = logits
            for processor in self._processors:
                scores = processor(history, scores)
            allowed = scores
            if self._never:
                allowed = scores.index_fill(1, sent(self._never, scores.device), float("-inf"))
            if self._is_greedy:
                tokens = allowed.argmax(dim=-1)
                logprobs = torch.zeros_like(scores[:, 0])
                is_valid = scores.gather(1, tokens[:, None])[:, 0].isfinite()
            else:
                probabilities = allowed.softmax(dim=-1)
                tokens, is_valid = _invert(probabilities, uniforms)
                logprobs = probabilities.gather(1, tokens[:, None])[:, 0].log()
                if self._never:
                    logprobs = scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(dim=-1)
            if self._wants_raw:
                logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
            return Draw(tokens, logprobs, is_valid)


def _invert(probabilities: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first token whose cumulative probability exceeds u times the total, and whether the total is finite.

    The block that contains the token is found first, then the token in the block, so that only few numbers are summed
    in float64. With float32 sums, tokens at the end of a large vocabulary would be drawn too often or not at all. A
    token or block of probability 0 adds nothing to the sum, so it is never the first to exceed a number.
    """
    size = probabilities.shape[1]
    blocks = pad(probabilities, (0, -size % _BLOCK)).view(len(probabilities), -1, _BLOCK)
    mass = blocks.sum(dim=-1).to(uniforms.dtype)  # sums of 128 numbers, about as exact as the numbers themselves
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1:]
    is_valid = total.isfinite()
    # The largest u is one rounding step below 1, so u * total stays below the total and some block exceeds it.
    target = uniforms[:, None] * total
    block = torch.searchsorted(cumulative, target, right=True).where(is_valid, 0)
    inside = blocks.take_along_dim(block[:, :, None], dim=1)[:, 0].cumsum(dim=-1, dtype=uniforms.dtype)
    rest = target - pad(cumulative[:, :-1], (1, 0)).gather(1, block)
    # The block's sum in float64 may be smaller, because it is rounded differently. Keep the rest below it.
    rest = rest.minimum(inside[:, -1:] * _BELOW_ONE)
    tokens = block * _BLOCK + torch.searchsorted(inside, rest, right=True)
    return tokens.where(is_valid, 0)[:, 0], is_valid[:, 0]


@dataclass
class _Text:
    """The text of a completion so far, of which only the end can become part of a stop string."""

    stream: Any
    end: str = ""


@dataclass
class StopStrings:
    """Reads completions token by token, as vLLM does, until their text contains one of the strings.

    Special tokens are part of the text, so that they can be in a stop string. A character that is spread over tokens
    counts once its last token is there. Only what was sampled counts: no string begins in the prompt.

    Args:
        tokenizer: The policy's tokenizer.
        strings: The stop strings, none of them empty.
        prompts: The prompts, which decide whether the first word of a completion has a space in front.

    Raises:
        ConfigError: The tokenizer cannot decode token by token.
    """

    tokenizer: PreTrainedTokenizerBase | None
    strings: Sequence[str]
    prompts: Sequence[Sequence[int]]
    _texts: dict[tuple[int, int], _Text] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Check the tokenizer."""
        if self.tokenizer is None or not self.tokenizer.is_fast:
            raise ConfigError(
                f"stop={list(self.strings)}: text is compared token by token, which needs a tokenizer of the library "
                f"tokenizers, and {type(self.tokenizer).__name__} is none. Use such a tokenizer, or remove stop."
            )
        self._backend = self.tokenizer.backend_tokenizer
        self._num_kept = max(map(len, self.strings)) - 1  # characters with which a stop string may begin

    def is_complete(self, prompt: int, sample: int, token: int) -> bool:
        """Whether the next token of a completion completes a stop string.

        Args:
            prompt: Number of the prompt.
            sample: Number of the completion among those of the prompt.
            token: Id of the token. Tokens have to come in order.
        """
        text = self._texts.get((prompt, sample))
        if text is None:
            stream = DecodeStream(ids=list(self.prompts[prompt]), skip_special_tokens=False)
            text = self._texts[prompt, sample] = _Text(stream)
        found = text.end + self._piece(text, token)
        text.end = found[max(len(found) - self._num_kept, 0) :]
        return any(stop in found for stop in self.strings)

    def _piece(self, text: _Text, token: int) -> str:
        """The text that a token adds."""
        try:
            return text.stream.step(self._backend, token) or ""
        except Exception as error:
            # After bytes that are no text, a stream may find that its text has changed; its class has no own error.
            if "prefix" not in str(error):
                raise
            text.stream = DecodeStream(skip_special_tokens=False)
            return text.stream.step(self._backend, token) or ""


@dataclass(frozen=True, slots=True)
class DistinctPrompt:
    """A prompt; equal ones, with the same images, are computed once."""

    ids: tuple[int, ...]
    images: Images | None


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Sample number `sample` of prompt number `request` in the call."""

    request: int
    sample: int


def batches_of(
    prompts: Sequence[Sequence[int]], images: Sequence[Images | None] | None, num_samples: int, max_rows: int
) -> list[dict[DistinctPrompt, list[SampleRow]]]:
    """Distinct prompts with their rows, in batches of similar lengths with at most `max_rows` rows, or one prompt."""
    rows: dict[DistinctPrompt, list[SampleRow]] = {}
    for request, prompt in enumerate(prompts):
        one = DistinctPrompt(tuple(prompt), None if images is None else images[request])
        rows.setdefault(one, []).extend(SampleRow(request, sample) for sample in range(num_samples))
    batches: list[dict[DistinctPrompt, list[SampleRow]]] = []
    num_rows = max_rows
    for one in sorted(rows, key=lambda one: len(one.ids)):
        if num_rows + len(rows[one]) > max_rows:
            batches.append({})
            num_rows = 0
        batches[-1][one] = rows[one]
        num_rows += len(rows[one])
    return batches


def routes_of_rows(
    of_prompts: Sequence[Tensor],
    of_steps: Sequence[Tensor],
    rows_of_steps: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> list[Tensor]:
    """The experts of all tokens of each row that were run, on the host; see `Completion.routes`.

    Args:
        of_prompts: [R] those of each row's prompt.
        of_steps: Of each step, [rows that ran, L, k].
        rows_of_steps: Of each step, the rows that ran, in their order.
        lengths: [R] tokens that were drawn for each row, of which the last was not run.
    """
    owners = torch.tensor([row for rows in rows_of_steps for row in rows], dtype=torch.long)
    ran = torch.cat([of_prompts[0][:0], *(routes.cpu() for routes in of_steps)])
    parts = torch.split(ran[owners.argsort(stable=True)], [length - 1 for length in lengths])
    return [torch.cat(of_row) for of_row in zip(of_prompts, parts, strict=True)]


# Smallest number of elements of a weight for which packing pays off.
_SMALLEST = 2**19
# Maximum total size of the packed copies, in bytes. The head is packed first, because it is the largest.
_MEMORY = 2**30


@contextmanager
def packed_linears(model: nn.Module) -> Iterator[None]:
    """Context in which large fp32 linear layers on the CPU use a packed copy of their weights, made on entry.

    Results equal those of the layers up to rounding, and have no gradients. Weights must not change inside.
    """
    packed: list[tuple[nn.Linear, Any]] = []
    memory = _MEMORY if _has_packing() else 0
    try:
        for module in _packable(model):
            memory -= module.weight.nbytes
            if memory < 0:
                break
            packed.append((module, vars(module).get("forward")))
            module.forward = _packed_forward(module)  # type: ignore[assignment, method-assign]  # of this module only
        yield
    finally:
        for module, before in packed:
            del module.forward
            if before is not None:
                vars(module)["forward"] = before


def _has_packing() -> bool:
    """Whether oneDNN is available and enabled, and this version of torch has the operators for packing."""
    is_available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_reorder_linear_weight", "_linear_pointwise")
    is_on = is_available and bool(torch.backends.mkldnn.enabled)
    return is_on and all(hasattr(torch.ops.mkldnn, name) for name in names)


def _packable(model: nn.Module) -> list[nn.Linear]:
    """The layers that can be packed, last layers first. Subclasses and patched layers may compute something else."""
    return [
        module
        for module in reversed(list(model.modules()))
        if type(module) is nn.Linear
        and ("forward" not in vars(module) or HEAD_FORWARD in vars(module))
        and type(module.weight) is nn.Parameter
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
        and module.weight.numel() >= _SMALLEST
    ]


def _packed_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach())

    def forward(input: Tensor) -> Tensor:
        if input.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return linear(input, module.weight, module.bias)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, module.bias, "none", [], "")
        return output

    return forward
