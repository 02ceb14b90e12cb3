"""Options of distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from prefrl.errors import ConfigError
from prefrl.options.fields import apply, flat, json_mapping, opt, parse_json
from prefrl.options.generation_rules import LEAST_TEMPERATURE
from prefrl.options.online import OnlineOptions
from prefrl.options.params import KwargsValue, Params, ParamsOf, hyperparameters, kwargs
from prefrl.options.policy_rules import DISTILLATION_RULES, MOVING_TEACHER_RULES
from prefrl.options.preference import ReferenceOptions
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


@hyperparameters
class MovingTeacherParams(Params):
    """How a teacher moves toward the student."""

    update_rate: Annotated[float, Gt(0), Le(1)] = opt(
        0.05, "Each update sets the teacher to update_rate * student + (1 - update_rate) * teacher."
    )
    sync_steps: Annotated[int, Ge(1)] = opt(1, "Optimizer steps between two updates of the teacher.")


@dataclass
class TeacherOptions:
    """The teacher, a model that the policy moves towards."""

    teacher_model_name_or_path: dict[str, Any] | str | None = opt(
        None,
        "Model that teaches, with the same vocabulary: a name on the Hub or a folder. A mapping of names to models "
        "gives each row of the dataset the teacher that its column teacher names; on the command line, give it as "
        "JSON. The argument teacher_model of the trainer takes instances, too.",
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = opt(
        None,
        "Arguments of from_pretrained for a teacher that is given by name. By default, those of model_init_kwargs. On "
        "the command line, give them as JSON.",
    )

    @property
    def needs_teacher(self) -> str:
        """Why a teacher is needed and what could be one, as text; empty: nothing needs it."""
        return (
            "there is nothing to learn from. Give a model with the student's vocabulary, set teacher_server_base_url, "
            "let the student teach itself with teacher_prompt, or set on_policy_fraction=0 and give a dataset that "
            "prefrl teacher has written"
        )

    @property
    def teaches_itself(self) -> bool:
        """Whether the policy is the teacher if no other is given."""
        return False

    @property
    def lacks_teacher(self) -> bool:
        """Whether a teacher is needed and options name none."""
        return bool(self.needs_teacher) and self.teacher_model_name_or_path is None and not self.teaches_itself

    def parse_teachers(self) -> None:
        """Read what the command line gave as JSON."""
        parse_json(self, "teacher_model_init_kwargs")
        if isinstance(given := self.teacher_model_name_or_path, str) and given.lstrip().startswith("{"):
            self.teacher_model_name_or_path = json_mapping(given, "teacher_model_name_or_path")


@dataclass(init=False, repr=False, eq=False)
class DistillationOptions(TeacherOptions, OnlineOptions):
    """Options of distillation, and shared ones with other defaults."""

    hints: ClassVar[Mapping[str, Any]] = {"teacher_prompt": str | Callable[[Mapping[str, Any]], Any] | None}
    best_metric: ClassVar[str] = "loss"
    learns_from_rewards: ClassVar[bool] = False
    spike_metrics: ClassVar[tuple[str, ...]] = ("grad_norm", "divergence")

    lmbda: float | None = flat("on_policy_fraction")  # of GKD
    teacher_model_revision: str | None = flat("teacher_model_init_kwargs", "revision")
    teacher_model_server_url: str | None = flat("teacher_server_base_url")
    loss_top_k: int | None = flat("teacher_server_kwargs", "top_k")
    teacher_update_rate: float | None = flat("teacher_weights_kwargs", "update_rate")
    teacher_sync_steps: int | None = flat("teacher_weights_kwargs", "sync_steps")

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
    teacher_prompt: str | None = opt(
        None,
        "Column of the dataset with the prompt that the teacher sees instead of the student's: text or messages, for "
        "example with the solution. In Python, it can also be a function that makes the prompt from a row. With it, "
        "the teacher can be the student itself, if no other is given.",
    )
    teacher_weights: Literal["frozen", "ema", "live"] = opt(
        "frozen",
        "Weights of a teacher that is the student itself: those at the start of training ('frozen'), a moving average "
        "('ema'), or the current ones, without a gradient ('live').",
    )
    teacher_weights_kwargs: KwargsValue = kwargs(
        "How the weights of a teacher move.", {"ema": MovingTeacherParams}, switch="teacher_weights"
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
    def teaches_itself(self) -> bool:
        """See `TeacherOptions.teaches_itself`."""
        others = self.teacher_model_name_or_path is not None or self.has_teacher_server
        return self.teacher_prompt is not None and not others

    @property
    def lacks_teacher(self) -> bool:
        """See `TeacherOptions.lacks_teacher`."""
        return super().lacks_teacher and not self.has_teacher_server

    moving_teacher_params = ParamsOf("teacher_weights_kwargs", MovingTeacherParams)

    @property
    def of_teacher(self) -> ReferenceOptions:
        """The options of a reference model that is the teacher."""
        if self.teacher_weights != "ema":
            return ReferenceOptions(beta=1.0)
        params = self.moving_teacher_params
        return ReferenceOptions(
            beta=1.0,
            sync_ref_model=True,
            ref_model_mixup_alpha=params.update_rate,
            ref_model_sync_steps=params.sync_steps,
        )

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
        self.parse_teachers()
        apply(self, DISTILLATION_RULES)
        super().validate()
        apply(self, MOVING_TEACHER_RULES)

    def validate_episodes(self, *, has_episodes: bool) -> None:
        """See `OnlineOptions.validate_episodes`."""
        super().validate_episodes(has_episodes=has_episodes)
        if has_episodes and self.teacher_prompt is not None:
            raise ConfigError(
                f"teacher_prompt={self.teacher_prompt!r} with episodes: what tools and environments add to a prompt, "
                "and prompts of later turns, are not in the teacher's. Leave it out."
            )
