"""Direct preference optimization on pairs of the policy's own completions."""

from __future__ import annotations

from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.trainer.online_dpo_config import OnlineDPOConfig
from prefrl.trainer.online_dpo_pairs import PairLearner
from prefrl.types import ReferencedBatch

__all__ = ["OnlineDPOTrainer"]


class OnlineDPOTrainer(OnlineTrainer[ReferencedBatch]):
    """Minimizes -log sigmoid(beta * (log-ratio of the better - log-ratio of the worse completion)).

    Log-ratios are log pi - log pi_ref; the better completion of a prompt is the one with the higher reward. A judge
    that compares completions can serve as a reward, too: `prefrl.rewards.get_judge_reward`. See `OnlineTrainer` for
    the arguments.

    Source: Guo et al. 2024, arXiv 2402.04792.
    """

    algorithm = "online_dpo"
    config_class = OnlineDPOConfig
    args: OnlineDPOConfig
    learner_class = PairLearner

    def cut(self, batch: ReferencedBatch, rows_per_micro_batch: int) -> list[ReferencedBatch]:
        """See `BaseTrainer`; never splits a pair. A prompt gives one, whatever `num_generations` is."""
        if self.args.max_tokens_per_micro_batch is not None:
            return batch.split(self.args.max_tokens_per_micro_batch, whole_groups=True)
        return batch.chunks(2 * self.args.per_device_train_batch_size)
