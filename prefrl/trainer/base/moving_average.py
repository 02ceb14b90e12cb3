"""An exponential moving average of the weights, beside the weights that are trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback

from prefrl import distributed
from prefrl.models.averages import AveragedWeights

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["MovingAverage"]

_log = logging.getLogger(__name__)

_FILE = "ema.safetensors"
_COUNT = "num_updates"


class MovingAverage(TrainerCallback):
    """ema = d_t * ema + (1 - d_t) * weights after each optimizer step, with d_t = min(decay, (1 + t) / (10 + t)).

    t counts the steps; it makes the average follow the weights while it is young. Steps that are left out do not
    count. A checkpoint holds the average in float32.

    Args:
        decay: The largest d_t.

    Source: Polyak and Juditsky 1992; the warm-up is that of TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.average: AveragedWeights | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts with the weights before the first step."""
        if state.global_step == 0:
            self._begin(distributed.unwrap(kwargs["model"]))

    def _begin(self, model: nn.Module) -> None:
        self.num_updates, self.average = 0, AveragedWeights(model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the weights after a step into the average."""
        assert self.average is not None
        if kwargs["optimizer"].step_was_skipped:
            return
        self.num_updates += 1
        self.average.mix(1.0 - min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)))

    def save(self, folder: Path, *, writes: bool) -> None:
        """Write the average into a checkpoint. All processes must call it."""
        assert self.average is not None
        state = self.average.state(keep=writes)
        if writes:
            tensors = {name: tensor.contiguous() for name, tensor in state.items()}
            save_file(tensors, folder / _FILE, metadata={_COUNT: str(self.num_updates)})

    def load(self, model: nn.Module, folder: Path) -> None:
        """Read what `save` wrote, or begin with the model's weights, if a resumed run begins to average."""
        self._begin(model)
        assert self.average is not None
        if not (folder / _FILE).exists():
            if distributed.is_main():
                _log.warning("%s has no %s: the average of the weights starts with its weights.", folder, _FILE)
            return
        with safe_open(folder / _FILE, framework="pt") as file:
            self.num_updates = int(file.metadata()[_COUNT])
            self.average.load(file.get_tensor)
