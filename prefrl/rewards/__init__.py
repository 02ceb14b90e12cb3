"""Rewards: the protocol, the runner that calls them, and the built-in rewards."""

from prefrl.rewards.base import RewardFunction, RewardSource
from prefrl.rewards.call import PairwiseJudge, get_judge_reward
from prefrl.rewards.code import get_code_reward
from prefrl.rewards.format import (
    format_reward,
    get_length_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    single_choice_reward,
    think_format_reward,
)
from prefrl.rewards.graders.combined import BySource, Combined
from prefrl.rewards.graders.models import LabelModel, PairwiseModel, ScoreModel
from prefrl.rewards.graders.plain import PythonGrader, StringCheck, TextSimilarity
from prefrl.rewards.maths import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_numeric_reward,
    numeric_reward,
    reasoning_accuracy_reward,
)
from prefrl.rewards.model import ModelReward
from prefrl.rewards.named import REWARD_FUNCTIONS, ReasoningGym, reasoning_gym_dataset, register_reward
from prefrl.rewards.runner import RewardRunner, RewardScores
from prefrl.sandbox import LocalSandbox, RemoteSandbox, SandboxLimits

__all__ = [
    "REWARD_FUNCTIONS",
    "BySource",
    "Combined",
    "LabelModel",
    "LocalSandbox",
    "ModelReward",
    "PairwiseJudge",
    "PairwiseModel",
    "PythonGrader",
    "ReasoningGym",
    "RemoteSandbox",
    "RewardFunction",
    "RewardRunner",
    "RewardScores",
    "RewardSource",
    "SandboxLimits",
    "ScoreModel",
    "StringCheck",
    "TextSimilarity",
    "accuracy_reward",
    "format_reward",
    "get_code_reward",
    "get_cosine_scaled_reward",
    "get_judge_reward",
    "get_length_reward",
    "get_numeric_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "numeric_reward",
    "reasoning_accuracy_reward",
    "reasoning_gym_dataset",
    "register_reward",
    "single_choice_reward",
    "think_format_reward",
]
