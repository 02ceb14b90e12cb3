"""How vision-language models read the images of flat rows: what differs between families of models.

An image is a run of placeholder tokens, whose embeddings the model replaces with the features of its vision tower, in
order. Flat rows therefore only need the images in the order of their placeholders. The self-check compares a row with
images with the model's own forward, so a family that needs more than these rules falls back to padded rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from prefrl.types import Images

# Models whose processors put the images of a sequence along the second dimension, after that of the sequences.
_NESTED = ("idefics2", "idefics3", "smolvlm")
# Arguments of the forward that are 1 at placeholders and 0 elsewhere.
_TYPES = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True)
class ImageRules:
    """How a family of models reads images.

    Args:
        dim: The dimension along which the inputs of several sequences are joined.
        type_names: Arguments of the forward that are 1 at placeholders and 0 elsewhere.
        has_blocks: The tokens of an image see each other, also those after themselves.
        rope_index: Positions of a sequence in time, height and width, if the model has them; `get_rope_index` of
            transformers.
    """

    dim: int
    type_names: tuple[str, ...]
    has_blocks: bool
    rope_index: Callable[..., tuple[Tensor, Tensor]] | None

    def join(self, images: Sequence[Images], device: torch.device) -> dict[str, Tensor]:
        """The inputs of sequences with images, in the order of their placeholders, on a device."""
        names = list(images[0].inputs) if images else []
        joined = {name: torch.cat([one.inputs[name] for one in images], self.dim) for name in names}
        return {name: tensor.to(device, non_blocking=True) for name, tensor in joined.items()}

    def types(self, images: Sequence[Images | None], width: int, *, starts: Sequence[int] | None = None) -> Tensor:
        """[B, width] int64: 1 at the placeholders of sequences, 0 elsewhere.

        Args:
            images: Of each sequence.
            width: Columns.
            starts: The column of each sequence's first token; None: 0.
        """
        types = torch.zeros(len(images), width, dtype=torch.long)
        for row, one in enumerate(images):
            first = 0 if starts is None else starts[row]
            for start, stop in () if one is None else one.runs:
                types[row, first + start : first + stop] = 1
        return types

    def positions(self, images: Images) -> RowPositions:
        """Positions of a sequence with images, for a model that has `rope_index`."""
        assert self.rope_index is not None
        types = self.types([images], images.runs[-1][1] + 1)
        grids = {name: grid for name, grid in images.inputs.items() if name.endswith("_grid_thw")}
        positions, _ = self.rope_index(torch.zeros_like(types), mm_token_type_ids=types, **grids)
        return RowPositions(positions[:, 0])


@dataclass(frozen=True, eq=False)
class RowPositions:
    """Positions in time, height and width of the tokens of a sequence with images.

    Args:
        table: [3, S + 1] int64: of all tokens up to the last image, and of the first one after it. From there on,
            positions count up in all three dimensions.
    """

    table: Tensor

    def of(self, start: int, length: int) -> Tensor:
        """[3, length] int64 of some tokens, counted from the start of the sequence."""
        index = torch.arange(start, start + length)
        last = self.table.size(1) - 1
        return self.table[:, index.clamp(max=last)] + (index - last).clamp(min=0)


def placeholder_ids(model: PreTrainedModel) -> list[int]:
    """The tokens that stand for images and videos: a model must not sample them."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    ids = {getattr(model.config, name, None) for name in names}
    vocab_size = model.config.get_text_config().vocab_size
    return sorted(token for token in ids if token is not None and token < vocab_size)


def adapts_images(model: PreTrainedModel) -> bool:
    """Whether an adapter on frozen weights changes how images are read.

    Args:
        model: A PeftModel.
    """
    base: Any = model.get_base_model()
    if image_rules(base) is None:
        return False
    parts = (base.get_decoder(), base.get_output_embeddings())
    language = {id(parameter) for part in parts for parameter in part.parameters()}
    return any(parameter.requires_grad and id(parameter) not in language for parameter in model.parameters())


def image_rules(model: PreTrainedModel) -> ImageRules | None:
    """The rules for a model; None if it reads no images."""
    if getattr(model.config, "vision_config", None) is None:
        return None
    base: Any = model.base_model
    parameters = inspect.signature(base.forward).parameters
    text_config = model.config.get_text_config()
    return ImageRules(
        dim=1 if model.config.model_type in _NESTED else 0,
        type_names=tuple(name for name in _TYPES if name in parameters),
        has_blocks="token_type_ids" in parameters
        or getattr(text_config, "use_bidirectional_attention", None) == "vision",
        rope_index=getattr(base, "get_rope_index", None),
    )
