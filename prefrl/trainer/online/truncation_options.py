"""Which distribution the losses score where the sampler does not draw from the whole softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from prefrl.options.fields import opt
from prefrl.options.rules import example, when

if TYPE_CHECKING:
    from prefrl.losses.truncation import Truncation

__all__ = ["TRUNCATION_RULES", "TruncationOptions", "cuts_of"]

_NEUTRAL = {"top_p": (1.0,), "top_k": (None, 0), "min_p": (None, 0), "repetition_penalty": (1.0,)}


def cuts_of(options: Any) -> dict[str, Any]:
    """The sampling options that make the sampler's distribution differ from the softmax at the temperature."""
    values = {name: getattr(options, name) for name in _NEUTRAL}
    return {name: value for name, value in values.items() if value not in _NEUTRAL[name]}


@dataclass
class TruncationOptions:
    """Log-probs of completions that were sampled with `top_k`, `top_p`, `min_p` or `repetition_penalty`."""

    truncated_logprobs: Literal["exact", "softmax"] = opt(
        "exact",
        "How log-probs are computed with top_k, top_p, min_p or repetition_penalty. exact: under the distribution "
        "that was sampled from, in which the kept tokens are renormalized. softmax: under the whole softmax, as in "
        "TRL; policy gradients are then biased, and sampling is not corrected.",
    )

    @property
    def scoring_truncation(self) -> Truncation | None:
        """See `BaseConfig.scoring_truncation`."""
        from prefrl.losses.truncation import Truncation  # needs torch, which the checks below do not

        cuts = cuts_of(self)
        return Truncation(**cuts) if cuts and self.truncated_logprobs == "exact" else None


TRUNCATION_RULES = (
    when(
        lambda o: o.truncated_logprobs != "exact" and not cuts_of(o),
        "truncated_logprobs={truncated_logprobs!r} has no effect because sampling is not truncated. Remove it, or set "
        "top_k, top_p, min_p or repetition_penalty.",
        example("grpo", truncated_logprobs="softmax"),
    ),
)
