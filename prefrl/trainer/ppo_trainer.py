"""Proximal policy optimization with a critic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.models.adapters import is_peft_model
from prefrl.models.critic import Critic
from prefrl.trainer.arguments import check_arguments
from prefrl.trainer.base_trainer import Optimizers
from prefrl.trainer.configs import PPOConfig
from prefrl.trainer.online.policy_terms import CriticBatch
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.trainer.ppo_critic import (
    add_critic_groups,
    attach_critic,
    clip_apart,
    critic_loss,
    make_critic,
    refuse_reward_model,
    save_gathered,
    set_decays,
    split_state,
    warm_up_critic,
)
from prefrl.types import LossOutput, TokenBatch

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from torch import Tensor, nn
    from transformers import BitsAndBytesConfig, TrainerCallback

    from prefrl.data.images import ProcessingClass
    from prefrl.rewards.base import RewardSource, RewardSources
    from prefrl.trainer.evaluation import ComputeMetrics
    from prefrl.trainer.online.sampling import Agents, EnvironmentFactory, Tools
    from prefrl.trainer.steps import Step


class PPOTrainer(OnlineTrainer[CriticBatch]):
    """Minimizes the clipped surrogate with advantages from a critic, plus vf_coef * value loss of the critic.

    A_t = sum over s >= t of (gamma lam)^(s - t) (r_s + gamma V_(s+1) - V_s), normalized over the tokens of the batch;
    r_s is -beta * (log pi_old - log pi_ref), plus the reward on the last token. The critic learns A_t + V_t.

    With `critic="model"`, the critic is the argument `value_model`: name, path or instance of a sequence classifier
    with one label, such as a reward model. None means a copy of the policy with a new head. A model given by name is
    loaded with `model_init_kwargs`. `ref_model` is the reference: name, path or instance. None means the model's
    weights at construction. `reward_model` is TRL's name for a single reward of `reward_funcs`. The trainer creates
    its optimizer itself, because it also trains the critic. See `OnlineTrainer` for the other arguments.

    Source: Schulman et al. 2017, arXiv 1707.06347; Schulman et al. 2015 (GAE), arXiv 1506.02438; Ouyang et al. 2022.
    """

    algorithm = "ppo"
    config_class = PPOConfig
    args: PPOConfig

    def __init__(  # noqa: PLR0913 - TRL's constructor
        self,
        model: str | Path | PreTrainedModel | nn.Module,
        reward_funcs: RewardSources | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | Mapping[str, Dataset | IterableDataset] | None = None,
        processing_class: ProcessingClass | None = None,
        reward_processing_classes: ProcessingClass | list[ProcessingClass | None] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: Tools | None = None,
        rollout_func: None = None,
        environment_factory: EnvironmentFactory | None = None,
        value_model: str | PreTrainedModel | None = None,
        ref_model: str | Path | PreTrainedModel | None = None,
        reward_model: RewardSource | None = None,
        compute_metrics: ComputeMetrics | None = None,
        eval_reward_funcs: RewardSources | None = None,
        teacher_model: str | Path | PreTrainedModel | None = None,
        agent: Agents | None = None,
    ) -> None:
        check_arguments(type(self), {"model": model, "ref_model": ref_model})
        self._ref_model, reward_funcs = ref_model, _one_of(reward_funcs, reward_model)
        refuse_reward_model(value_model, reward_funcs=reward_funcs, eval_reward_funcs=eval_reward_funcs)
        if optimizers != (None, None):
            raise ConfigError("optimizers: PPO's optimizer also trains the critic. Leave it to the trainer.")
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            peft_config=peft_config,
            quantization_config=quantization_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
            compute_metrics=compute_metrics,
            eval_reward_funcs=eval_reward_funcs,
            teacher_model=teacher_model,
            agent=agent,
        )
        self.critic: Critic = make_critic(self, self.args, value_model)
        self.scorer.critic = self.critic
        # The critic becomes part of the trained module, so every backend reduces and shards the gradients of both.
        attach_critic(self.policy, self.critic)

    @property
    def policy_learns(self) -> bool:
        """See `BaseTrainer`. The policy does not learn in the steps of `critic_warmup`."""
        return bool(self.state.global_step >= self.args.critic_warmup)

    def forward_sum(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """See `BaseTrainer`; covers the parameters of the policy and of the critic, as on other ranks."""
        scores, values = self.scorer.scores_and_values(model, batch, self.critic, want=())
        return scores.logprobs.sum() + values.sum()

    def loss(self, model: nn.Module, batch: CriticBatch) -> LossOutput:
        """The policy's loss, multiplied by 0 in the steps of `critic_warmup`, plus the critic's loss."""
        scores, values = self.scorer.scores_and_values(
            model, batch, self.critic, want=self.objective.want, ref_hidden=batch.ref_hidden
        )
        output = self._policy_loss(batch, scores)
        value = critic_loss(self.args, batch, values)
        weight = 1.0 if self.policy_learns else 0.0
        total = weight * output.total + value.total
        return replace(output, total=total, metrics=output.metrics | value.metrics)

    # The critic is part of the model that HuggingFace trains, and its parameters are in the optimizer's last groups.

    def group_parameters(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        """See `BaseTrainer`; the critic has groups of its own, and its norms and biases do not decay either."""
        super().group_parameters(optimizer, model)
        decaying = self.get_decay_parameter_names(model)
        self._weight_decays = add_critic_groups(optimizer, model, self.critic, self.args, decaying=decaying)

    def adapt_scheduler(self, scheduler: Any, num_training_steps: int) -> Any:
        """See `BaseTrainer`; the critic's rates may have a warm-up of their own."""
        return warm_up_critic(scheduler, self.args, num_training_steps, first=len(self._weight_decays))

    def run_step(self, model: nn.Module, step: Step, num_items: Tensor | float | None) -> Tensor:
        """See `OnlineTrainer`; during `critic_warmup`, weight decay of the policy is off, too."""
        set_decays(self.optimizer, self.lr_scheduler, self._weight_decays, is_warmup=not self.policy_learns)
        return super().run_step(model, step, num_items)

    def penalized(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """See `BaseTrainer`. During `critic_warmup`, these are only the critic's."""
        return super().penalized(model) if self.policy_learns else self.critic.parameters()

    def clip(self, model: nn.Module) -> Any:
        """See `Loop`. The norms of policy and critic are clipped separately."""
        if distributed.updates_in_backward(self.accelerator):  # it has already clipped the gradients of both together
            return super().clip(model)
        return clip_apart(self.accelerator, model, self.critic, self.args)

    def write_state(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        """See `BaseTrainer`; the critic goes to the folder `critic`."""
        policy, critic = split_state(self.policy.state_dict() if state is None else state)
        super().write_state(folder, policy)
        self.critic.save(folder / "critic", critic)

    def _save_update_state(self, folder: Path) -> None:
        """See `OnlineTrainer`; also writes the critic if the backend's checkpoint does not contain it."""
        super()._save_update_state(folder)
        if self._is_critic_left_out and distributed.keeps_checkpoints_partitioned(self.accelerator):
            save_gathered(self.critic, folder, writes=self.args.should_save)

    def _load_update_state(self, folder: Path) -> None:
        """See `OnlineTrainer`; also loads the critic, unless the backend has loaded it with the policy."""
        super()._load_update_state(folder)
        self._load_critic(folder)

    def best_loaded(self, checkpoint: Path) -> None:
        """See `BaseTrainer`; loads its critic, too."""
        self._load_critic(checkpoint)

    def _load_critic(self, folder: Path) -> None:
        if self._is_critic_left_out:
            self.critic.load(folder / "critic")

    @property
    def _is_critic_left_out(self) -> bool:
        """Whether the backend does not load the critic: HuggingFace does not know it, FSDP2 may save only adapters."""
        return is_peft_model(self.policy) if self.is_fsdp_enabled else not self.is_deepspeed_enabled


def _one_of(reward_funcs: RewardSources | None, reward_model: RewardSource | None) -> RewardSources | None:
    if reward_funcs is not None and reward_model is not None:
        raise ConfigError("reward_model and reward_funcs: both name the rewards. Pass all of them in reward_funcs.")
    return reward_model if reward_funcs is None else reward_funcs
