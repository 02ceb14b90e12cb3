"""The interface of a custom loss of prime-rl, which is not on PyPI: the fields that its docs/algorithms.md lists.

https://github.com/PrimeIntellect-ai/prime-rl, "Custom Loss", as of September 2026.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]
