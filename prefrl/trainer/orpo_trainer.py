"""Odds ratio preference optimization."""

from __future__ import annotations

from torch import nn

from prefrl.losses.preference.pairwise import odds_ratio
from prefrl.metrics import Mean
from prefrl.trainer.configs import ORPOConfig
from prefrl.trainer.offline.preference import RowScores, pairs_per_chosen_token, preference_metrics
from prefrl.trainer.offline.trainer import OfflineTrainer
from prefrl.types import LabeledBatch, LossOutput


class ORPOTrainer(OfflineTrainer[LabeledBatch, LabeledBatch]):
    """Minimizes the token-mean NLL of the chosen responses plus beta * the mean odds-ratio term over pairs.

    Datasets have preference rows, as for DPO. There is no reference model.

    Source: Hong et al. 2024, arXiv 2403.07691, eq. 6 and 7.
    """

    algorithm = "orpo"
    args: ORPOConfig

    def prepare_step(self, batches: list[LabeledBatch]) -> list[LabeledBatch]:
        """See `OfflineTrainer`; counts pairs per chosen token over the step, which scales the NLL."""
        self._pairs_per_chosen_token = pairs_per_chosen_token(batches, self.args.device)
        return batches

    def loss(self, model: nn.Module, batch: LabeledBatch) -> LossOutput:
        """Sum over pairs, with the NLL scaled so that it is a mean over tokens."""
        scores = self.scorer.scores(model, batch, want=("entropy", "correct", "mean_logit"))
        rows = RowScores.of(scores.logprobs, batch)
        means = rows.logps / rows.lengths
        chosen, rejected = batch.pair_index
        odds = odds_ratio(means[chosen], means[rejected])
        nll = -rows.logps[chosen].sum()
        total = self._pairs_per_chosen_token * nll + self.args.beta * odds.loss.sum()
        rewards = self.args.beta * means.detach()
        metrics = preference_metrics(batch, scores, logps=means, rewards=rewards)
        metrics["nll_loss"] = Mean(nll.detach(), rows.lengths[chosen].sum())
        metrics["log_odds_chosen"] = Mean(odds.log_odds_ratio.sum(), len(chosen))
        metrics["log_odds_ratio"] = Mean(-odds.loss.detach().sum(), len(chosen))
        return LossOutput(total=total, metrics=metrics, predictions=rewards)
