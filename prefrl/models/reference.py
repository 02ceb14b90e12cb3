"""The reference model of a KL term: by default, the weights that the policy had when training started.

The reference is never reloaded by name. It is the policy as it was at construction, even if it had been trained
before, or a model that the user passes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from transformers import PreTrainedModel

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.losses.per_token import TokenScores, WantName
from prefrl.models.adapters import is_peft_model
from prefrl.models.fingerprint import is_neutral_adapter, weights_fingerprint
from prefrl.models.forward import Scoring, prepare_like, scores_in_pieces
from prefrl.models.modes import eval_mode
from prefrl.models.scoring import HEAD_FORWARD, head_logits, inner_model, needed_head
from prefrl.types import TokenBatch


def make_reference(
    model: PreTrainedModel,
    *,
    beta: float,
    moves: bool = False,
    given: PreTrainedModel | None = None,
    name: str = "ref_model",
) -> Reference | None:
    """The reference that a KL weight of `beta` needs.

    | model | reference |
    |---|---|
    | any, `beta` 0 | none |
    | any, with a `given` reference | the given model; a copy of it if it `moves` |
    | adapter that changes nothing yet (LoRA with B = 0) | the model with its adapter off: no memory |
    | any other adapter, or a reference that `moves` | copies of the trainable parameters, swapped in while scoring |
    | no adapter | a copy |

    Args:
        model: The policy, without a backend's wrappers.
        beta: Weight of the KL term.
        moves: Whether `mix` will be called.
        given: The user's `ref_model`, or a teacher. Its weights and modes are not changed; it is moved to the device
            of the batches.
        name: The argument that it was given as, for messages.

    Raises:
        ConfigError: `given` cannot be the reference of this model.
    """
    if given is not None:
        _check_given(model, given, name, beta=beta, moves=moves)
        prepare_like(given, model)
        return _Separate(_copy(given) if moves else given)
    if beta == 0:
        return None
    if not is_peft_model(model):
        return _Separate(_copy(model))
    kind = _AdapterOff if is_neutral_adapter(model) and not moves else _Swapped
    return kind(model)


def _copy(model: PreTrainedModel) -> PreTrainedModel:
    return distributed.copy_of(model).requires_grad_(False).eval()


class Reference(ABC):
    """Scores tokens under the reference weights, wherever they are kept."""

    own_model: PreTrainedModel | None = None  # a separate model that runs its own passes; None if the policy is used

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # Weight and bias of the head of a model that is partitioned, since the last `scores`.
        self._whole_head: list[Tensor] = []
        self._fingerprint: str | None = None

    @abstractmethod
    def _in_place(self) -> AbstractContextManager[PreTrainedModel]:
        """A model with the reference weights inside; all changes made for that are undone at the end."""

    @abstractmethod
    def _head(self, head: nn.Module, hidden: Tensor) -> Tensor:
        """The output of `head`, the model's head, with the reference weights; the model is not changed for that."""

    def _go_to(self, device: torch.device) -> None:
        """A separate model follows a batch to its device."""
        model = self.own_model
        # Models that are spread over devices or quantized raise when they are moved, even to their own device.
        if model is not None and model.device != device and not distributed.is_sharded(model):
            model.to(device)

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The weights that `mix` changes, no two of which share memory; empty if it changes none."""

    def logprobs(self, batch: TokenBatch, scoring: Scoring, *, max_tokens: int | None = None) -> Tensor:
        """[N] float32 nats, no gradient, see `scores_in_pieces`; the policy is unchanged afterwards."""
        return self.scores(batch, scoring, max_tokens=max_tokens).logprobs

    def scores(
        self, batch: TokenBatch, scoring: Scoring, *, max_tokens: int | None = None, want: Collection[WantName] = ()
    ) -> TokenScores:
        """`logprobs`, and what else is wanted from the same pass, such as the hidden states for `logits`."""
        self._go_to(batch.device)
        if "hidden" in want and self.own_model is not None and distributed.is_sharded(self.own_model):
            head = needed_head(inner_model(self.own_model))
            parameters = head.parameters(recurse=False) if isinstance(head, nn.Linear) else ()
            self._whole_head = [distributed.whole(each).detach() for each in parameters]
        with self._in_place() as model, eval_mode(model):
            return scores_in_pieces(model, batch, scoring, max_tokens=max_tokens, want=want)

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, V] logits before temperature, no gradient, from [m, h] hidden states returned by `scores`.

        It uses the head only, and may be called inside the policy's own forward and backward pass, as in
        `token_logprobs(..., reference=ReferenceLogits(hidden, reference.logits))`. Hidden states that were stored
        before a `mix` do not fit the head after it.
        """
        self._go_to(hidden.device)
        inner = inner_model(self._model)
        head = needed_head(inner)
        with torch.no_grad(), eval_mode(head):
            return head_logits(inner, partial(self._head, head), hidden)

    def fingerprint(self) -> str:
        """Digest of the current reference weights, see `weights_fingerprint`; cached until `mix` or a load."""
        if self._fingerprint is None:
            with self._in_place() as model:
                self._fingerprint = weights_fingerprint(model)
        return self._fingerprint

    def mix(self, policy: nn.Module, alpha: float) -> None:
        """Move the reference: alpha * policy + (1 - alpha) * reference, parameter by parameter.

        Source: Gorbatovski et al. 2024 (TR-DPO), arXiv 2404.09656, eq. 2.
        """
        self._fingerprint = None
        _mix(self.state_dict(), policy, alpha)

    def assign(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Set some weights, by their names in the policy. All ranks must call it with the same values."""
        self._fingerprint = None
        weights = self.state_dict()
        for name, value in values:
            distributed.load_whole(weights[name], value)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        self._fingerprint = None
        _load(self.state_dict(), state)


class _Separate(Reference):
    """A separate model: a copy of the policy, or one that the user passed."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.own_model = model

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._model.named_parameters())  # not detached: that would lose how they are partitioned

    def _head(self, head: nn.Module, hidden: Tensor) -> Tensor:
        # Ranks run it on different numbers of chunks, so a backend must not gather it for each of them.
        weights = [each.to(hidden.device, hidden.dtype) for each in self._whole_head]
        logits: Tensor = linear(hidden, *weights) if weights else head(hidden)
        return logits

    @contextmanager
    def _in_place(self) -> Iterator[PreTrainedModel]:
        yield self._model


class _AdapterOff(Reference):
    """The policy with its adapter off; right for an adapter that changed nothing at construction."""

    def mix(self, policy: nn.Module, alpha: float) -> None:
        raise ConfigError(
            "sync_ref_model=True: this reference is the model with its adapter disabled, which cannot move. "
            "Construct it with moves=True, or train without peft_config."
        )

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def _head(self, head: nn.Module, hidden: Tensor) -> Tensor:
        return called_inside(_without_adapter(head), hidden)

    @contextmanager
    def _in_place(self) -> Iterator[PreTrainedModel]:
        # peft changes requires_grad of adapter weights when it switches them off, and later sets it on all of them.
        required = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        try:
            with self._model.disable_adapter():
                yield self._model
        finally:
            for parameter, requires_grad in required:
                parameter.requires_grad_(requires_grad)


class _Swapped(Reference):
    """The policy, with the trainable parameters from construction swapped in while it scores.

    `mix` averages the parameters themselves: for LoRA these are A and B, not their product.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._weights = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    def scores(
        self, batch: TokenBatch, scoring: Scoring, *, max_tokens: int | None = None, want: Collection[WantName] = ()
    ) -> TokenScores:
        """See `Reference`.

        Raises:
            ConfigError: Hidden states are wanted, the head has an adapter, and ZeRO-3 partitions it.
        """
        if "hidden" in want and self._names_in_head and distributed.is_zero3(self._model):
            raise ConfigError(
                "target_modules contains the output head, which ZeRO-3 partitions: a reference or teacher with other "
                "weights of this adapter cannot be compared over the whole vocabulary. Leave the head out of "
                "target_modules, or train with FSDP2, ZeRO-2 or DDP."
            )
        return super().scores(batch, scoring, max_tokens=max_tokens, want=want)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._weights)

    def _head(self, head: nn.Module, hidden: Tensor) -> Tensor:
        weights = {own: self._weights[name].to(hidden.device) for own, name in self._names_in_head.items()}
        if not weights:
            return called_inside(head, hidden)
        logits: Tensor = functional_call(head, weights, (hidden,))
        return logits

    @cached_property
    def _names_in_head(self) -> dict[str, str]:
        """The swapped weights that the head uses, shared ones included: name in the head -> name in the model."""
        head = needed_head(inner_model(self._model))
        names = {id(parameter): name for name, parameter in self._model.named_parameters() if name in self._weights}
        return {own: names[id(p)] for own, p in head.named_parameters() if id(p) in names}

    @contextmanager
    def _in_place(self) -> Iterator[PreTrainedModel]:
        parameters = {name: p for name, p in self._model.named_parameters() if name in self._weights}
        if distributed.is_sharded(self._model):
            current = {name: distributed.whole(p).detach().clone() for name, p in parameters.items()}
            put = distributed.load_whole
        else:
            current = {name: p.data for name, p in parameters.items()}
            put = _point_at
        try:
            for name, weight in self._weights.items():
                put(parameters[name], weight.to(current[name].device))
            yield self._model
        finally:
            for name, data in current.items():
                put(parameters[name], data)


def _point_at(target: Tensor, value: Tensor) -> None:
    """Exchange the underlying memory, without copying."""
    target.data = value


def called_inside(head: nn.Module, hidden: Tensor) -> Tensor:
    """The output of the policy's head within its own call: a second call would give back its partitioned weights."""
    hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    is_called = all(map(distributed.is_backend_hook, hooks))  # with other hooks, it is called for each chunk
    logits: Tensor = vars(head).get(HEAD_FORWARD, head)(hidden) if is_called else head(hidden)
    return logits


def _without_adapter(module: nn.Module) -> nn.Module:
    """The base model's module inside adapter layers. A neutral adapter has no other wrappers than `base_layer`."""
    inner = module._modules.get("base_layer")
    return module if inner is None else _without_adapter(inner)


def _check_given(model: PreTrainedModel, given: PreTrainedModel, name: str, *, beta: float, moves: bool) -> None:
    if beta == 0:
        raise ConfigError("ref_model has no effect with beta=0, because no reference is scored. Leave ref_model=None.")
    if given is model:
        remedy = f"Load {name} separately."
        if name == "ref_model":
            remedy = "Leave ref_model=None: the reference is then the model as it is now."
        raise ConfigError(f"{name} is the model that is trained, so it would change during training. {remedy}")
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    shared = [name for name, parameter in given.named_parameters() if id(parameter) in trained]
    if shared:
        raise ConfigError(
            f"{name} shares trained parameters with the model ({shared[0]}, {len(shared)} in all), so it would "
            f"change during training. Leave {name}=None, or load {name} separately."
        )
    check_vocabulary(name, given, model)
    if moves and _shapes(model) != _shapes(given):
        raise ConfigError(
            "sync_ref_model=True mixes the two models parameter by parameter, but ref_model has different "
            "parameters. Give a ref_model of the same architecture and adapter, or set sync_ref_model=False."
        )


def check_vocabulary(name: str, given: PreTrainedModel, model: PreTrainedModel) -> None:
    """Refuse a model that has another number of tokens than the one that is trained.

    Raises:
        ConfigError: Says which, by the name that it was given as.
    """
    size, own = (inner_model(each).config.get_text_config().vocab_size for each in (given, model))
    if size != own:
        padded = (
            " If only the padding of their vocabularies differs, DistillationTrainer can learn from a teacher on "
            "servers (teacher_server_base_url), or from what prefrl teacher has stored."
        )
        raise ConfigError(
            f"{name} has a vocabulary of {size} tokens, but the model has {own}: their distributions cannot be "
            f"compared. Choose a model with the same vocabulary.{padded if name.startswith('teacher') else ''}"
        )


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: distributed.shape_of(parameter) for name, parameter in model.named_parameters()}


def _mix(weights: Mapping[str, Tensor], policy: nn.Module, alpha: float) -> None:
    parameters = dict(policy.named_parameters())
    for name, weight in weights.items():
        distributed.mix(weight, parameters[name], alpha)


def _load(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    if state.keys() != weights.keys():
        differing = sorted(state.keys() ^ weights.keys())
        raise ConfigError(
            f"the saved reference has different parameters ({', '.join(differing[:3])}, {len(differing)} in all). "
            "Resume with the model, peft_config and freeze that the checkpoint was written with."
        )
    for name, weight in weights.items():
        distributed.load_whole(weight, state[name])


_M = TypeVar("_M", bound="nn.Module")


def create_reference_model(model: _M, num_shared_layers: int | None = None, pattern: str | None = None) -> _M:
    """A frozen copy of a model, in eval mode.

    Trainers make their reference themselves: a copy is needed only to compare with other weights than those at the
    start of training.

    Args:
        model: The model. It is not changed, unless layers are shared.
        num_shared_layers: Number of leading layers that both models share, together with the embeddings. Shared layers
            are frozen. None means that nothing is shared.
        pattern: Part of the names of the parameters of layer `{layer}`, such as "transformer.h.{layer}.". By default,
            it is found.

    Raises:
        ConfigError: No parameter has such a name, or layers of a partitioned model are to be shared.
    """
    reference = distributed.copy_of(model).requires_grad_(False).eval()
    if num_shared_layers is None:
        return reference
    if distributed.is_sharded(model):
        raise ConfigError(
            f"num_shared_layers={num_shared_layers}: the weights of the model are partitioned over processes and "
            "cannot be shared. Leave it out."
        )
    for name in _shared_names(model, num_shared_layers, pattern):
        weight = model.get_parameter(name).requires_grad_(False)
        reference.get_parameter(name).data = weight.data
    return reference


def _shared_names(model: nn.Module, num_layers: int, pattern: str | None) -> list[str]:
    """The parameters before the first of layer `num_layers`, which counts from 0."""
    usual = rf"(?:^|\.)(?:layers|h|blocks?)\.{num_layers}\."
    found = usual if pattern is None else re.escape(pattern.format(layer=num_layers))
    names = [name for name, _ in model.named_parameters()]
    first = next((i for i, name in enumerate(names) if re.search(found, name)), None)
    if first is None:
        raise ConfigError(
            f"num_shared_layers={num_layers}, pattern={pattern!r}: no parameter has a name like this. Names look like "
            f"{', '.join(names[:3])}. Set a smaller number, or pattern."
        )
    return names[:first]
