"""A config of torchtitan's reinforcement learning with a loss and an advantage estimator of prefrl.

With this file as my_configs.py:

    python -m torchtitan.experiments.rl.train --module my_configs --config cispo_qwen3_0_6b
"""

from dataclasses import replace

from torchtitan.experiments.rl.controller import Controller
from torchtitan.experiments.rl.examples.alphabet_sort.config_registry import rl_grpo_qwen3_0_6b_varlen

from prefrl.integrations.torchtitan import AdvantageEstimator, PolicyLoss


def cispo_qwen3_0_6b() -> Controller.Config:
    """The example of GRPO, with CISPO and RLOO in its place."""
    config = rl_grpo_qwen3_0_6b_varlen()
    loss = PolicyLoss.Config(loss_type="cispo", hyperparameters={"epsilon": 1.0, "epsilon_high": 4.0})
    advantage = AdvantageEstimator.Config(estimator="rloo")
    return replace(
        config,
        trainer=replace(config.trainer, loss=loss),
        rollouter=replace(config.rollouter, advantage=advantage),
    )
