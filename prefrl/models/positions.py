"""How many positions a model has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from prefrl.distributed import shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PositionLimit", "position_limit"]


@dataclass(frozen=True)
class PositionLimit:
    """The most tokens of a row, `max_position_embeddings` in the model's config.

    Args:
        count: Number of positions.
        is_table: The model looks positions up in a table, which has no more of them. Otherwise it computes them, and
            the limit is what its config says that it was trained for.
        is_scaled: It stretches the positions that it computes, which its limit may not tell.
    """

    count: int
    is_table: bool
    is_scaled: bool = False


def position_limit(model: PreTrainedModel) -> PositionLimit | None:
    """The limit of a model; None if its config names none."""
    config = model.config.get_text_config()
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int) or count < 1:
        return None
    tokens = model.get_input_embeddings().weight
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is not tokens]
    tables += [buffer for buffer in model.buffers() if buffer.dim() == 2]
    # OPT and similar models have two more rows, for padding.
    is_table = any(count <= shape_of(table)[0] <= count + 2 for table in tables)
    return PositionLimit(count, is_table, is_scaled=_is_scaled(getattr(config, "rope_parameters", None) or {}))


def _is_scaled(rope: dict[str, Any]) -> bool:
    """Whether rotary embeddings are other than the default ones, in all layers or in those of one type."""
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(kind.get("rope_type", "default") != "default" for kind in kinds)
