"""Options of distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from prefrl.options.fields import apply, flat, opt, parse_json
from prefrl.options.generation_rules import LEAST_TEMPERATURE
from prefrl.options.online import OnlineOptions
from prefrl.options.params import KwargsValue, Params, ParamsOf, hyperparameters, kwargs
from prefrl.options.policy_rules import DISTILLATION_RULES
from prefrl.options.types import Length, NumSamples, Seconds


@hyperparameters
class TeacherServerParams(Params):
    """Settings of requests to servers that serve the teacher."""

    top_k: Annotated[int, Ge(1)] = opt(
        20,
        "Number of likeliest tokens whose log-probs are asked for, at each token. The others are compared as one. "
        "More than 20 need a server that was started with --max-logprobs.",
    )
    model: str | None = opt(None, "Name of the model on the servers. The default is the first one that they list.")
    request_timeout: Seconds = opt(600.0, "Time limit, in seconds, for the request that scores one text.")
    server_timeout: Seconds = opt(120.0, "Seconds to wait for a server that is starting, unreachable or restarting.")
    api_key_env: str | None = opt(
        None,
        "Environment variable with the servers' key. By default, servers on this machine get the key of prefrl "
        "vllm-serve, and others get none.",
    )


@dataclass
class TeacherOptions:
    """The teacher, a model that the policy moves towards."""

    teacher_model_name_or_path: str | None = opt(
        None,
        "Model that teaches, with the same vocabulary: a name on the Hub or a folder. The argument teacher_model of "
        "the trainer takes an instance, too.",
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = opt(
        None,
        "Arguments of from_pretrained for a teacher that is given by name. By default, those of model_init_kwargs. On "
        "the command line, give them as JSON.",
    )

    @property
    def needs_teacher(self) -> str:
        """What needs the teacher, as text; empty: there is none."""
        return "there is nothing to learn from"


@dataclass(init=False, repr=False, eq=False)
class DistillationOptions(TeacherOptions, OnlineOptions):
    """Options of distillation, and shared ones with other defaults."""

    best_metric: ClassVar[str] = "loss"
    learns_from_rewards: ClassVar[bool] = False
    spike_metrics: ClassVar[tuple[str, ...]] = ("grad_norm", "divergence")

    lmbda: float | None = flat("on_policy_fraction")  # of GKD
    teacher_model_revision: str | None = flat("teacher_model_init_kwargs", "revision")
    teacher_model_server_url: str | None = flat("teacher_server_base_url")
    loss_top_k: int | None = flat("teacher_server_kwargs", "top_k")

    teacher_server_base_url: list[str] | None = opt(
        None,
        "URLs of vLLM servers that serve the teacher, in place of a teacher in the trainer's memory. They share the "
        "requests. The divergence is computed from their log-probs of the likeliest tokens.",
        decides=False,
    )
    teacher_server_kwargs: KwargsValue = kwargs(
        "Settings of requests to servers of the teacher.",
        {True: TeacherServerParams},
        switch="has_teacher_server",
        off="teacher_server_base_url=None. Set teacher_server_base_url.",
    )
    beta: Annotated[float, Ge(0), Le(1)] = opt(
        1.0,
        "Divergence of the student from the teacher at each token: 1 is the reverse KL, KL(student || teacher), 0 is "
        "the forward KL, KL(teacher || student), and values between them are generalized Jensen-Shannon divergences.",
    )
    later_tokens: bool = opt(
        False,
        "Also give each token credit for the divergence of later tokens, relative to the prompt's other completions. "
        "With beta=1, this is the exact gradient of the KL of whole completions. Without it, as in TRL and GKD, each "
        "token counts by itself.",
    )
    on_policy_fraction: Annotated[float, Ge(0), Le(1)] = opt(
        1.0,
        "Probability that a prompt is completed by the student. Otherwise, the completion in the dataset's column "
        "completion is learned from. GKD calls this lambda.",
    )
    num_generations: NumSamples = opt(1, "Completions per prompt.")
    temperature: Annotated[float, Ge(LEAST_TEMPERATURE), Le(100)] = opt(
        1.0, "Sampling temperature; the distributions of student and teacher are compared at the same temperature."
    )
    max_completion_length: Length | None = opt(
        512, "Maximum completion length in tokens. None means what max_prompt_length leaves of the model's context."
    )

    teacher_server_params = ParamsOf("teacher_server_kwargs", TeacherServerParams)

    @property
    def teacher_urls(self) -> list[str]:
        """Base URLs of the teacher's servers, without trailing slashes."""
        return [url.rstrip("/") for url in self.teacher_server_base_url or []]

    @property
    def has_teacher_server(self) -> bool:
        """Whether the teacher is on servers."""
        return bool(self.teacher_urls)

    @property
    def corrects_sampling(self) -> bool:
        """False: prefixes may come from any policy, and later_tokens has importance weights of its own."""
        return False

    @property
    def takes_old_samples(self) -> bool:
        """See `RolloutOptions.takes_old_samples`."""
        return not self.later_tokens

    def validate(self) -> None:
        """See `BaseOptions.validate`."""
        parse_json(self, "teacher_model_init_kwargs")
        apply(self, DISTILLATION_RULES)
        super().validate()
