"""PPO's critic: the expected reward before a token is chosen.

The value at a response token is read from the hidden state that predicts the token. That state has seen everything
before the token but not the token itself, so the value does not depend on the action, as a baseline requires. There
are two kinds of critic: a head on the policy's hidden states, and a separate model. A new head starts at 0. The first
advantages are then the rewards themselves, without the noise of a random head, and the head still learns from the
first step on, because the gradient of its weights is the error times the hidden state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import find_adapter_config_file

from prefrl.distributed import copy_of, load_whole, shape_of, unpartitioned
from prefrl.errors import ConfigError, cause_of, require
from prefrl.losses.per_token import WantName
from prefrl.models.adapters import is_peft_model
from prefrl.models.classifier import add_classifier
from prefrl.models.forward import in_pieces, inputs_of, prepare_like, verdict_of, with_idle_image
from prefrl.models.modes import eval_mode, hub_or_cache, seeded
from prefrl.models.plans import Plan
from prefrl.models.scoring import ScoringRequest, inner_model, is_classifier, read_out
from prefrl.types import TokenBatch

_HEAD_FILE = "value_head.safetensors"


class Critic(Protocol):
    """Estimates, for each response token, the value of the state in which it was chosen."""

    @property
    def module(self) -> nn.Module:
        """The trained module, on the device that the policy had at construction."""
        ...

    @property
    def wants(self) -> tuple[WantName, ...]:
        """What the policy's forward pass has to compute for `values`."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters; none of them belongs to the policy."""
        ...

    def values(self, batch: TokenBatch, *, hidden: Tensor | None) -> Tensor:
        """Values with gradients.

        Args:
            batch: B rows, N response tokens, at least one row.
            hidden: [N, h] `TokenScores.hidden` of the policy's pass over the batch, if `wants` asks for it.
        Returns:
            [N] float32, in the unit of the rewards; 0 where `batch.trainable` is False. Connected to every parameter
            that the pass uses, even if nothing is trainable.
        """
        ...

    def frozen_values(self, batch: TokenBatch, *, max_tokens: int | None) -> Tensor:
        """`values` without gradients or dropout, from a separate pass, see `in_pieces`."""
        ...

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write the module's whole weights, bit-exact, into `folder`, which is created if it is missing."""
        ...

    def load(self, folder: Path) -> None:
        """Load what `save` wrote into the existing parameters.

        Raises:
            ConfigError: The folder has no critic, or that of another model.
        """
        ...


class ValueHead(nn.Module):
    """One number from a hidden state: w . x + b, in float32 whatever the trunk's dtype. Starts at 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.score = _new_head(hidden_size, bias=True, dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """[...] from [..., h]."""
        return _head_values(self.score, hidden)


class HeadCritic:
    """A `ValueHead` on the policy's hidden states: needs almost no memory, and no extra forward pass in training."""

    wants: tuple[WantName, ...] = ("hidden",)

    def __init__(self, policy: PreTrainedModel, *, detach_trunk: bool, plan: Plan = "auto") -> None:
        """A new head.

        Args:
            policy: The trained model, including an adapter, without a backend's wrappers.
            detach_trunk: Let the value loss train the head only, not the policy through its hidden states.
            plan: How a pass of `frozen_values` lays out its rows.
        """
        inner = inner_model(policy)
        self.module = ValueHead(inner.config.get_text_config().hidden_size).to(inner.device)
        self._policy, self._detaches, self._plan = policy, detach_trunk, plan

    def parameters(self) -> list[nn.Parameter]:
        """See `Critic`."""
        return list(self.module.parameters())

    def values(self, batch: TokenBatch, *, hidden: Tensor | None) -> Tensor:
        """See `Critic`.

        Raises:
            ValueError: There are no hidden states.
        """
        if hidden is None:
            raise ValueError("hidden=None: the value head reads the policy's hidden states. Score with want=wants.")
        values: Tensor = self.module(hidden.detach() if self._detaches else hidden)
        return values.where(batch.trainable, 0.0)

    def frozen_values(self, batch: TokenBatch, *, max_tokens: int | None) -> Tensor:
        """See `Critic`; the policy's logits are not computed."""

        def score(piece: TokenBatch) -> Tensor:
            return _scored(self._policy, piece, self._plan, self.module.score)

        with eval_mode(self._policy):
            return in_pieces(self._policy, score, batch, max_tokens=max_tokens)

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """See `Critic`."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(state), folder / _HEAD_FILE)

    def load(self, folder: Path) -> None:
        """See `Critic`."""
        if not (folder / _HEAD_FILE).exists():
            raise ConfigError(
                f"{folder} has no {_HEAD_FILE}: resume with the same kind of critic that was saved there."
            )
        _load_state(self.module, load_file(folder / _HEAD_FILE), folder)


class ModelCritic:
    """A separate model with a scalar head, from `value_model`. It is saved and loaded like any transformers model."""

    wants: tuple[WantName, ...] = ()

    def __init__(self, model: PreTrainedModel, *, plan: Plan = "auto") -> None:
        """Use `model`, which is trained in place. `plan`: how a pass lays out its rows."""
        self.module = model
        self._head: nn.Linear = model.score
        self._plan = plan

    def parameters(self) -> list[nn.Parameter]:
        """See `Critic`."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def values(self, batch: TokenBatch, *, hidden: Tensor | None = None) -> Tensor:
        """See `Critic`. Runs the model in its current mode; the policy's hidden states are not used."""
        return _scored(self.module, batch, self._plan, self._head)

    def frozen_values(self, batch: TokenBatch, *, max_tokens: int | None) -> Tensor:
        """See `Critic`."""
        with eval_mode(self.module):
            return in_pieces(self.module, self.values, batch, max_tokens=max_tokens)

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """See `Critic`; `value_model` can load the folder, too."""
        self.module.save_pretrained(folder, state_dict=dict(state))

    def load(self, folder: Path) -> None:
        """See `Critic`."""
        loaded, new = _from_pretrained(type(self.module), folder, {})
        if new:
            raise ConfigError(f"the critic saved in {folder} has no weights for {', '.join(sorted(new)[:3])}.")
        _load_state(self.module, loaded.state_dict(), folder)


def value_model(
    policy: PreTrainedModel,
    given: str | os.PathLike[str] | nn.Module | None = None,
    *,
    model_init_kwargs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The model of a `ModelCritic`: a sequence classifier with one label, used to score every token.

    | given | model |
    |---|---|
    | nothing | a copy of the policy's current body, with its adapter merged, and a new head |
    | name or path of a reward model, or of its LoRA adapter, which is merged | that model with its head |
    | name or path of a language model | its body with a new head |
    | a sequence classifier with one label | that instance, which is trained in place |

    A reward model's score of the text so far is a first estimate of the value (InstructGPT). A new head starts at 0.

    Args:
        policy: The trained model, including an adapter, without a backend's wrappers; not changed.
        given: Name, path or instance; None: a copy of the policy's body.
        model_init_kwargs: For `from_pretrained`; weights are float32 unless it has a `dtype`.

    Returns:
        The model, on the policy's device, in training mode and prepared for scoring.

    Raises:
        ConfigError: The model cannot be loaded or cannot compute values, its vocabulary differs from the policy's, it
            shares parameters with the policy, or an argument has no effect.
        ImportError: An adapter is given and peft is not installed.

    Source: Ouyang et al. 2022 (InstructGPT), arXiv 2203.02155, section 3.5 (from the reward model)
    """
    if not isinstance(given, nn.Module):
        add_classifier(inner_model(policy).config)
    if isinstance(given, (str, os.PathLike)):
        model = _loaded(given, model_init_kwargs or {})
    elif model_init_kwargs:
        raise ConfigError(
            f"model_init_kwargs={dict(model_init_kwargs)} of the critic has no effect, because no model is loaded. "
            "Remove it, or give value_model by name."
        )
    else:
        model = _copy_with_head(policy) if given is None else given
    _check(model, policy)
    prepare_like(model, policy)
    return model.to(inner_model(policy).device).train()


def _new_head(size: int, *, bias: bool, dtype: torch.dtype) -> nn.Linear:
    """A linear layer of zeros, created without drawing random numbers."""
    head = nn.Linear(size, 1, bias=bias, dtype=dtype, device="meta").to_empty(device="cpu")
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def _head_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    """[...] from [..., h], at least in float32.

    Not in autocast's dtype: advantages are differences of values, and small compared with the values themselves.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        values: Tensor = head(hidden.to(head.weight.dtype)).squeeze(-1)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _scored(model: PreTrainedModel, batch: TokenBatch, plan: Plan, head: nn.Linear) -> Tensor:
    """[N] the output of `head` for the hidden states that predict trainable tokens; 0 at all other tokens."""
    verdict = verdict_of(model)
    if verdict.own_logits:
        reason = next(iter(verdict.reasons.values()), "its results differ from those of its own forward pass")
        raise ConfigError(f"values cannot be read from a {type(inner_model(model)).__name__}: {reason}.")

    def readout(model: PreTrainedModel, rows: Tensor, request: ScoringRequest) -> dict[str, Tensor]:
        return {"values": _head_values(head, rows)}

    rows = with_idle_image(model, batch)
    inputs = inputs_of(model, rows, plan, verdict)
    positions = rows.trainable_positions
    values: Tensor = read_out(model, inputs, inputs.predictors[positions], readout, own_logits=False)["values"]
    return values.new_zeros(rows.num_tokens).index_copy(0, positions, values)[: batch.num_tokens]


def _copy_with_head(policy: PreTrainedModel) -> PreTrainedModel:
    """A copy of the policy's body, in its dtype, with a new head; all of it is trained."""
    if getattr(policy, "is_quantized", False):
        raise ConfigError(
            "value_model=None: the policy is quantized, so a copy of it cannot be trained. Give a value_model, or "
            "use a value head."
        )
    if not is_peft_model(policy):
        body = copy_of(policy.base_model)
    elif policy.active_peft_config.is_prompt_learning:
        raise ConfigError(
            "value_model=None: the policy's adapter puts virtual tokens in front of each row, which cannot be merged "
            "into a copy. Give a value_model, or use a value head."
        )
    else:
        body = copy_of(policy).merge_and_unload().base_model
    body.config.num_labels = 1
    try:
        with unpartitioned(), torch.device("meta"):  # no memory: the body already exists
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(body.config)
    except ValueError as error:
        raise ConfigError(
            f"value_model=None: transformers has no sequence classifier for a {type(body).__name__}. Give a "
            "value_model of another architecture, or use a value head."
        ) from error
    setattr(model, model.base_model_prefix, body)
    if isinstance(model._modules.get("score"), nn.Linear):
        model.score = _new_head(model.score.in_features, bias=False, dtype=body.dtype).to(body.device)
    return model.requires_grad_(True)


def _loaded(name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> PreTrainedModel:
    arguments = {"dtype": torch.float32, "num_labels": 1, **arguments}
    with _loading(name):
        is_adapter = find_adapter_config_file(os.fspath(name)) is not None
    if is_adapter:
        return _merged_adapter(name, arguments)
    model, new = _from_pretrained(AutoModelForSequenceClassification, name, arguments)
    if new - {"score.weight"}:
        raise ConfigError(
            f"value_model={os.fspath(name)!r} has no weights for {', '.join(sorted(new)[:3])}: must be a decoder with "
            "one linear score head, or a language model to make a critic from."
        )
    if new:
        nn.init.zeros_(model.score.weight)
    return model


def _merged_adapter(name: str | os.PathLike[str], arguments: Mapping[str, Any]) -> PreTrainedModel:
    peft = require("peft", extra="peft", feature=f"the value_model {os.fspath(name)!r}, an adapter,")
    with _loading(name):
        adapted = peft.AutoPeftModelForSequenceClassification.from_pretrained(name, **arguments)
    model: PreTrainedModel = adapted.merge_and_unload()
    return model.requires_grad_(True)


def _from_pretrained(
    kind: Any, folder: str | os.PathLike[str], arguments: Mapping[str, Any]
) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of weights that are newly initialized because the folder does not have them."""
    with _loading(folder):
        model, info = kind.from_pretrained(folder, output_loading_info=True, **arguments)
    lost = [key for key in info["unexpected_keys"] if key.startswith("score.")]
    if lost:
        raise ConfigError(
            f"{os.fspath(folder)!r} has {', '.join(lost)}, which a sequence classifier does not have: it classifies "
            "tokens. Give a critic that was saved by prefrl, a reward model or a language model."
        )
    return model, set(info["missing_keys"])


@contextmanager
def _loading(name: str | os.PathLike[str]) -> Iterator[None]:
    try:
        with seeded(0), hub_or_cache(name):  # new weights are drawn but not used
            yield
    except (OSError, ValueError, RuntimeError) as error:
        hint = " A critic has num_labels=1." if "ignore_mismatched_sizes" in str(error) else ""
        raise ConfigError(f"the critic cannot be loaded from {os.fspath(name)!r}: {error}{hint}") from cause_of(error)


def _load_state(module: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    own = module.state_dict(keep_vars=True)
    differing = sorted(name for name in own.keys() | state.keys() if _shape(own.get(name)) != _shape(state.get(name)))
    if differing:
        raise ConfigError(
            f"the critic saved in {folder} does not fit this one: {', '.join(differing[:3])}. Resume with the kind "
            "of critic that was saved."
        )
    for name, weight in own.items():
        load_whole(weight, state[name])


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else shape_of(tensor)


def _check(model: nn.Module, policy: PreTrainedModel) -> None:
    """Check that the model can be the critic of this policy.

    Raises:
        ConfigError: It cannot.
    """
    if is_peft_model(model):
        raise ConfigError(
            "value_model is a PeftModel, but a critic is trained in full: give model.merge_and_unload()."
        )
    if not isinstance(model, PreTrainedModel) or not is_classifier(model):
        raise ConfigError(
            f"value_model is a {type(model).__name__}: a critic is a sequence classifier with num_labels=1. Load it "
            "with AutoModelForSequenceClassification.from_pretrained(..., num_labels=1), or give its name."
        )
    parts = {name for name, _ in model.named_children()} - {model.base_model_prefix}
    if parts != {"score"} or not isinstance(model.score, nn.Linear):
        raise ConfigError(
            f"value_model is a {type(model).__name__} with {', '.join(sorted(parts))} on its body: values can only be "
            "read from a decoder with one linear layer, `score`. Use a reward model of a decoder, or a value head."
        )
    if model.score.out_features != 1:
        raise ConfigError(
            f"value_model has num_labels={model.score.out_features}: a value is one number. Load it with num_labels=1."
        )
    if getattr(model, "is_quantized", False) or model._hf_peft_config_loaded:
        raise ConfigError(
            "value_model is quantized or has an adapter inside, but a critic is trained in full: load it "
            "unquantized and without an adapter, or merge the adapter."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("no parameter of value_model requires a gradient: call value_model.requires_grad_(True).")
    _check_against(model, policy)


def _check_against(model: PreTrainedModel, policy: PreTrainedModel) -> None:
    shared = {id(parameter) for parameter in policy.parameters()}
    if any(id(parameter) in shared for parameter in model.parameters()):
        raise ConfigError(
            "value_model shares parameters with the policy, and both would train them. Leave value_model=None for a "
            "copy, or use a value head."
        )
    sizes = [inner_model(each).config.get_text_config().vocab_size for each in (model, policy)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"value_model has a vocabulary of {sizes[0]} tokens, but the policy has {sizes[1]}: the critic reads the "
            "policy's token ids. Give a value_model with the same vocabulary, or leave value_model=None."
        )
