"""The reference model of a KL term: the weights that the policy had when training began.

The reference is never loaded again by name: it is what the given model computed at construction, also if that model
was trained before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from prefrl.errors import ConfigError
from prefrl.models.forward import token_logprobs
from prefrl.models.load import is_peft_model
from prefrl.models.modes import eval_mode

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from prefrl.models.forward import Plan
    from prefrl.types import TokenBatch

__all__ = ["Reference", "logprobs_in_pieces", "make_reference"]


class Reference(Protocol):
    """Scores tokens under the reference weights."""

    def logprobs(self, batch: TokenBatch, *, temperature: float) -> Tensor:
        """[N] float32 nats, no gradient; the policy's weights and modes are as before afterwards."""
        ...

    def mix(self, policy: nn.Module, alpha: float) -> None:
        """Move the reference: alpha * policy + (1 - alpha) * reference, parameter by parameter.

        Source: Gorbatovski et al. 2024 (TR-DPO), arXiv 2404.09656, eq. 2.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """The weights that `mix` moves, no two of which share memory; empty if it moves none."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Read what `state_dict` gave."""
        ...


def make_reference(
    model: PreTrainedModel,
    *,
    beta: float,
    moves: bool = False,
    max_tokens: int | None = None,
    plan: Plan = "auto",
) -> Reference | None:
    """The reference that a KL weight of `beta` needs.

    | model | reference |
    |---|---|
    | any, `beta` 0 | none |
    | adapter that changes nothing yet (LoRA with B = 0) | the model with its adapter off: no memory |
    | any other adapter, or one that `moves` | copies of the trainable parameters, put in place while scoring |
    | no adapter | a copy |

    Args:
        model: The policy, without what a back-end puts around it.
        beta: Weight of the KL term.
        moves: Whether `mix` will be called.
        max_tokens: Forward tokens in one pass at most; None: a batch is one pass.
        plan: How a pass lays out its rows.

    Raises:
        ConfigError: `max_tokens` is not positive.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens={max_tokens}: must be at least 1, or None for no limit")
    if beta == 0:
        return None
    scorer = _Scorer(max_tokens, plan)
    if not is_peft_model(model):
        return _Copy(model, scorer)
    return _AdapterOff(model, scorer) if _is_neutral(model) and not moves else _Swapped(model, scorer)


def logprobs_in_pieces(
    model: nn.Module, batch: TokenBatch, *, temperature: float, max_tokens: int | None, plan: Plan = "auto"
) -> Tensor:
    """Log-probs of the response tokens without gradient, in passes of at most `max_tokens` forward tokens.

    Args:
        model: Scored in the mode that it is in.
        batch: B rows, N response tokens.
        temperature: Of the distribution scored.
        max_tokens: In one pass; a longer row is a pass of its own. None: one pass.
        plan: How a pass lays out its rows.

    Returns:
        [N] float32 nats, in the batch's order; 0 where `batch.trainable` is False.
    """
    with torch.no_grad():
        if max_tokens is None:
            return token_logprobs(model, batch, temperature=temperature, plan=plan).logprobs
        # Rows travel with their number, so that they can be put back in order.
        numbered = batch.replace(group_index=tuple(range(batch.num_rows)))
        rows: dict[int, Tensor] = {}
        for piece in numbered.split(max_tokens):
            scores = token_logprobs(model, piece, temperature=temperature, plan=plan).logprobs
            rows.update(zip(piece.group_index, torch.split(scores, list(piece.response_lengths)), strict=True))
        return torch.cat([rows[row] for row in range(batch.num_rows)])


class _Scorer:
    """How a reference scores, whichever kind it is."""

    def __init__(self, max_tokens: int | None, plan: Plan) -> None:
        self._max_tokens = max_tokens
        self._plan = plan

    def __call__(self, model: nn.Module, batch: TokenBatch, temperature: float) -> Tensor:
        with eval_mode(model):
            return logprobs_in_pieces(
                model, batch, temperature=temperature, max_tokens=self._max_tokens, plan=self._plan
            )


class _Copy:
    """A copy of a model without an adapter."""

    def __init__(self, model: PreTrainedModel, scorer: _Scorer) -> None:
        self._model = copy.deepcopy(model).eval()
        self._scorer = scorer

    def logprobs(self, batch: TokenBatch, *, temperature: float) -> Tensor:
        return self._scorer(self._model.to(batch.device), batch, temperature)

    def mix(self, policy: nn.Module, alpha: float) -> None:
        _mix(self.state_dict(), policy, alpha)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._model.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _load(self.state_dict(), state)


class _AdapterOff:
    """The policy with its adapter off; right for an adapter that changed nothing at construction."""

    def __init__(self, model: PreTrainedModel, scorer: _Scorer) -> None:
        self._model = model
        self._scorer = scorer

    def logprobs(self, batch: TokenBatch, *, temperature: float) -> Tensor:
        # peft changes requires_grad of adapter weights when it switches them off, and sets it on all of them after.
        required = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        try:
            with self._model.disable_adapter():
                return self._scorer(self._model, batch, temperature)
        finally:
            for parameter, requires_grad in required:
                parameter.requires_grad_(requires_grad)

    def mix(self, policy: nn.Module, alpha: float) -> None:
        raise ConfigError(
            "sync_ref_model=True: this reference is the model with its adapter off, which cannot move. Make it with "
            "moves=True, or train without peft_config."
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _load({}, state)


class _Swapped:
    """The policy with the trainable parameters of construction in the place of its own while it scores.

    `mix` mixes the parameters themselves: for LoRA that is A and B, not their product.
    """

    def __init__(self, model: PreTrainedModel, scorer: _Scorer) -> None:
        self._model = model
        self._scorer = scorer
        self._weights = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    def logprobs(self, batch: TokenBatch, *, temperature: float) -> Tensor:
        with self._in_place():
            return self._scorer(self._model, batch, temperature)

    def mix(self, policy: nn.Module, alpha: float) -> None:
        _mix(self._weights, policy, alpha)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._weights)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        _load(self._weights, state)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        parameters = dict(self._model.named_parameters())
        current = {name: parameters[name].data for name in self._weights}
        try:
            for name, weight in self._weights.items():
                parameters[name].data = weight.to(current[name].device)
            yield
        finally:
            for name, data in current.items():
                parameters[name].data = data


def _is_neutral(model: PreTrainedModel) -> bool:
    """Whether switching the adapter off leaves the model's function as it is now, and nothing else can be trained.

    True for LoRA whose B matrices are 0. Initialisations like PiSSA change the base model too, and have another B.
    """
    outputs, others = [], []
    for name, parameter in model.named_parameters():
        kind = name.split(".")
        if "lora_B" in kind or "lora_embedding_B" in kind:
            outputs.append(parameter)
        elif "lora_A" in kind or "lora_embedding_A" in kind:
            continue
        elif parameter.requires_grad or "modules_to_save" in kind or "lora_magnitude_vector" in kind:
            others.append(parameter)
    return bool(outputs) and not others and not any(bool(parameter.any()) for parameter in outputs)


def _mix(weights: Mapping[str, Tensor], policy: nn.Module, alpha: float) -> None:
    parameters = dict(policy.named_parameters())
    for name, weight in weights.items():
        weight.lerp_(parameters[name].detach().to(weight), alpha)


def _load(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    if state.keys() != weights.keys():
        differing = sorted(state.keys() ^ weights.keys())
        raise ConfigError(
            f"the saved reference has other parameters than this one ({', '.join(differing[:3])}, {len(differing)} in "
            "all). Resume with the model, peft_config and freeze that the checkpoint was written with."
        )
    for name, weight in weights.items():
        weight.copy_(state[name])
