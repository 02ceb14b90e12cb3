"""Contrastive preference optimization and related reference-free losses: SimPO, AlphaPO."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from prefrl.losses.preference.pairwise import CPO_LOSSES, box_cox
from prefrl.metrics import Mean
from prefrl.options.preference import PairParams
from prefrl.trainer.configs import CPOConfig
from prefrl.trainer.offline.preference import RowScores, make_pairs, pairs_per_chosen_token, preference_metrics
from prefrl.trainer.offline.trainer import OfflineTrainer
from prefrl.types import LabeledBatch, LossOutput

# Losses of the mean log-probs of responses; the others use their sums.
_OF_MEANS = ("ipo", "simpo", "alphapo")


class CPOTrainer(OfflineTrainer[LabeledBatch, LabeledBatch]):
    """Minimizes the mean over pairs of -log sigmoid(beta (log pi(chosen) - log pi(rejected))), plus cpo_alpha * NLL.

    `loss_type` chooses another loss of the same log-probs. The NLL of the chosen responses is a mean over tokens.
    Datasets have preference rows, as for DPO. There is no reference model.

    Source: Xu et al. 2024, arXiv 2401.08417, eq. 3 and 5; SimPO: Meng et al. 2024, arXiv 2405.14734, eq. 6; AlphaPO:
    Gupta et al. 2025, arXiv 2501.03884.
    """

    algorithm = "cpo"
    args: CPOConfig

    @cached_property
    def _loss_params(self) -> PairParams:
        params: PairParams = CPO_LOSSES[self.args.loss_type].params.from_options(self.args)
        return params

    def prepare_step(self, batches: list[LabeledBatch]) -> list[LabeledBatch]:
        """See `OfflineTrainer`; counts pairs per chosen token over the step, which scales the NLL."""
        self._pairs_per_chosen_token = pairs_per_chosen_token(batches, self.args.device)
        return batches

    def loss(self, model: nn.Module, batch: LabeledBatch) -> LossOutput:
        """Sum over pairs, with the NLL scaled so that it is a mean over tokens."""
        scores = self.scorer.scores(model, batch, want=("entropy", "correct", "mean_logit"))
        rows = RowScores.of(scores.logprobs, batch)
        pairs = make_pairs(rows)
        losses = CPO_LOSSES[self.args.loss_type].function(pairs, self._loss_params)
        nll = -pairs.chosen_logps.sum()
        total = losses.sum() + self.args.nll_weight * self._pairs_per_chosen_token * nll
        logps = rows.logps / rows.lengths if self.args.loss_type in _OF_MEANS else rows.logps
        rewards = self.args.beta * box_cox(logps, power=-self.args.alpha)  # alpha is 0 except for alphapo
        metrics = preference_metrics(batch, scores, logps=logps, rewards=rewards)
        metrics["nll_loss"] = Mean(nll.detach(), pairs.chosen_lengths.sum())
        return LossOutput(total=total, metrics=metrics, predictions=rewards.detach())
