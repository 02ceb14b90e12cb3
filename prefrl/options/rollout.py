"""Options of rollouts: how prompts are drawn, and how rewards are shaped, selected and summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from prefrl.options.base import BaseOptions
from prefrl.options.fields import Rule, ascending, example, flat, opt, when
from prefrl.options.generation_rules import unscored
from prefrl.options.params import KwargsValue, Params, ParamsOf, hyperparameters, kwargs
from prefrl.options.server_rules import DNS, FOLDER, are_local
from prefrl.options.types import Seconds

CurriculumWeighting = Literal["variance", "band"]


@hyperparameters
class CurriculumParams(Params):
    """Hyperparameters of `SuccessCurriculum`."""

    band: list[float] = opt([0.1, 0.9], "Lowest and highest success rate of prompts that are not replaced.")
    reward_bounds: list[float] = opt([0.0, 1.0], "Rewards of a failure and of a success.")
    floor: Annotated[float, Ge(0)] = opt(0.05, "Number that is added to the sampling weight of every prompt.")
    momentum: Annotated[float, Ge(0), Lt(1)] = opt(
        0.5, "Weight of the past in a prompt's success rate, an exponential moving average."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        ascending("reward_bounds", example("grpo", curriculum="band", curriculum_kwargs={"reward_bounds": [1, 0]})),
        ascending("band", example("grpo", curriculum="band", curriculum_kwargs={"band": [0.8, 0.2]})),
        when(
            lambda p: not 0 <= p.band[0] < p.band[1] <= 1,
            "band={band}: success rates must be within 0 .. 1",
            example("grpo", curriculum="band", curriculum_kwargs={"band": [0.5, 1.5]}),
        ),
    )


@hyperparameters
class ResamplingParams(Params):
    """Hyperparameters of dynamic sampling."""

    max_tries: int = opt(
        10,
        "Maximum number of times that prompts are replaced in a generation batch. 0 or less: no limit; the run ends "
        "with an error if a pass over the whole dataset finds nothing.",
    )
    reward_metric: str | list[str] | None = opt(
        None,
        "Name of the reward that must differ within a prompt. With a list of names, at least one of these must "
        "differ. The default is the total reward.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.reward_metric == [],
            "reward_metric=[]: must name at least one reward, or be None for the total reward",
            example("grpo", dynamic_sampling=True, dynamic_sampling_kwargs={"reward_metric": []}),
        ),
    )

    @property
    def metrics(self) -> Sequence[str | None]:
        """Names of the rewards that decide; None stands for the total."""
        return self.reward_metric if isinstance(self.reward_metric, list) else [self.reward_metric]


@hyperparameters
class ShapingParams(Params):
    """Hyperparameters of `shaped`."""

    stop_properly_penalty_coef: Annotated[float, Le(1)] | None = opt(
        None,
        "Factor for the total reward of completions that were cut off at the length limit. A number below 0 replaces "
        "their reward instead.",
    )
    missing_eos_penalty: Annotated[float, Gt(0)] | None = opt(
        None, "Number to subtract from the total reward of completions that were cut off or aborted."
    )
    normalize: bool = opt(
        False,
        "Divide total rewards by the running standard deviation of all totals so far, over all processes. If the "
        "advantages do not compare completions of a group, the running mean is subtracted, too.",
    )
    clip_range: list[float] | None = opt(
        None, "Clip total rewards to this range: the smallest and the largest value. By default, nothing is clipped."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        ascending("clip_range", example("grpo", reward_shaping_kwargs={"clip_range": [2.0, 1.0]})),
    )


@hyperparameters
class RewardModelParams(Params):
    """How reward models score that are not given as instances of `ModelReward`."""

    head: str | int | None = opt(
        None, "Label of a model with several that is the reward: its name or its index; None: the model has one."
    )
    per_token: bool = opt(False, "Divide the score by the number of tokens of the completion.")
    batch_size: Annotated[int, Ge(1)] = opt(16, "The most completions that the model scores at once.")
    max_length: Annotated[int, Ge(1)] | None = opt(
        None,
        "Remove tokens from the beginning of prompt and completion until this many are left; None: a text that is "
        "longer than the model's positions is an error.",
    )


SelectionRule = Literal["max_variance", "best", "random"]


ReweightMethod = Literal["pow", "max_min", "max_random"]


RowSelection = Literal["max_variance", "best", "random", "pow", "max_min", "max_random"]


@hyperparameters
class KeptParams(Params):
    """Hyperparameters of the rules of `kept_rows`."""

    num_selected: Annotated[int, Ge(1)] | None = opt(
        None, "Number of completions of each prompt to keep, below num_generations. It must be set."
    )


@hyperparameters
class PowParams(Params):
    """Hyperparameters of the method `pow` of `draw_counts`."""

    power: Annotated[float, Gt(0)] = opt(2.0, "Exponent of the reward.")


# Rules of `kept_rows` and methods of `draw_counts`, with their hyperparameters.
SELECTIONS: dict[str, type[Params]] = {
    "max_variance": KeptParams,
    "best": KeptParams,
    "random": KeptParams,
    "pow": PowParams,
    "max_min": Params,
    "max_random": Params,
}


@hyperparameters
class AtKParams(Params):
    """Which of pass@k, best@k and maj@k are computed, and what a correct sample is."""

    k: list[int] | None = opt(None, "Sizes k, such as [1, 8]. By default, nothing is computed.")
    reward: str | None = opt(
        None, "Name of the reward that decides whether a sample is correct. The default is the total reward."
    )
    threshold: float = opt(1.0, "Smallest value of that reward with which a sample counts as correct.")
    answer: str | None = opt(
        None,
        "Column of the answers that maj@k compares, which a reward logs with log_extra. By default, there is no "
        "maj@k.",
    )


@hyperparameters
class VLLMParams(Params):
    """Settings of requests and weight syncs that are rarely changed."""

    request_timeout: Seconds = opt(
        600.0,
        "Time limit, in seconds, for a request for all completions of a prompt. A late request is repeated once.",
    )
    guided_json: dict[str, Any] | None = opt(None, "Constrain completions to JSON that follows this schema.")
    guided_grammar: str | None = opt(None, "Constrain completions to this grammar (EBNF).")
    sync_folder: str | None = opt(
        None,
        "Folder that trainer and servers share; with delta_over='store' also a URL of fsspec, like s3://bucket/run. "
        "The default is /dev/shm if all servers are on this host.",
    )
    sync_timeout: Seconds = opt(300.0, "Time limit of a weight sync, in seconds.")
    delta_over: Literal["nccl", "gloo", "shm", "store"] | None = opt(
        None,
        "How weight_sync='delta' sends what has changed: by nccl, gloo or shm as weight_sync says, or as files that "
        "stay in sync_folder, so that a server that comes later reads all weights and the changes since then (store). "
        "The default is nccl on a GPU and gloo on a CPU, and shm with vllm_mode='colocate'.",
    )
    min_servers: Annotated[int, Ge(1)] | None = opt(
        None,
        "The fewest servers with which a run goes on; the others may come and go. By default, all that are listed in "
        "vllm_server_base_url, or one of dir: and dns:.",
    )
    admin_urls: list[str] | None = opt(
        None,
        "URLs of the servers behind a router, whose URL is vllm_server_base_url: the router gets the requests, and "
        "they the weights. Also dir: or dns:.",
    )


@hyperparameters
class AsyncParams(Params):
    """Hyperparameters of generation_mode='async'."""

    order: Literal["in_order", "ready"] = opt(
        "in_order",
        "Which groups a generation batch has: those of its own prompts (in_order), or those that finish first, "
        "whatever batch their prompts belong to (ready). With ready, which groups learn together depends on timing.",
    )
    stale: Literal["wait", "drop"] = opt(
        "wait",
        "With order='ready': what happens to a group whose oldest token would become older than max_staleness. wait: "
        "training waits for it, so each prompt is learned from exactly once. drop: its completions are discarded, and "
        "its prompt is asked again, so short completions are preferred.",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        when(
            lambda p: p.order == "in_order" and p.stale == "drop",
            "stale='drop' with order='in_order': no group can get too old, because no prompt is asked early enough "
            "for that. Set order='ready', or remove stale.",
            example("grpo", use_vllm=True, generation_mode="async", async_kwargs={"stale": "drop"}),
        ),
    )


@hyperparameters
class CorrectionParams(Params):
    """Hyperparameters of every correction: `low` and `high` of `losses.policy.off_policy.importance_weights`."""

    clip_min: Annotated[float, Gt(0), Le(1)] | None = opt(
        None, "Lower bound of the importance ratio. None means no bound."
    )
    clip_max: Annotated[float, Ge(1)] | None = opt(3.0, "Upper bound of the importance ratio. None means no bound.")


@hyperparameters
class EvalSamplingParams(Params):
    """How completions are sampled in evaluations. What is None is as in training."""

    top_p: Annotated[float, Ge(0.001), Le(1)] | None = opt(None, "See top_p.")
    top_k: Annotated[int, Ge(0)] | None = opt(None, "See top_k. 0 means all tokens.")
    min_p: Annotated[float, Ge(0), Le(1)] | None = opt(None, "See min_p. 0 turns it off.")
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] | None = opt(None, "See repetition_penalty.")
    max_completion_length: Annotated[int, Ge(1), Le(10**9)] | None = opt(
        None, "Maximum length of a completion in tokens. It may be longer than in training. Not for episodes."
    )

    @property
    def given(self) -> dict[str, Any]:
        """Those that differ from training, by the names of a generator's parameters."""
        renamed = {"max_completion_length": "max_tokens"}
        values = {renamed.get(name, name): getattr(self, name) for name in self.names()}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(init=False, repr=False, eq=False)
class RolloutOptions(BaseOptions):
    """Rewards, prompts, and the servers or the process that samples completions."""

    # Names of TRL for keys of mappings.
    vllm_importance_sampling_cap: float | None = flat("vllm_importance_sampling_kwargs", "clip_max")
    reward_clip_range: list[float] | None = flat("reward_shaping_kwargs", "clip_range")
    missing_eos_penalty: float | None = flat("reward_shaping_kwargs", "missing_eos_penalty")
    vllm_structured_outputs_regex: str | None = flat("vllm_guided_decoding_regex")
    vllm_importance_sampling_clip_min: float | None = flat("vllm_importance_sampling_kwargs", "clip_min")
    vllm_importance_sampling_clip_max: float | None = flat("vllm_importance_sampling_kwargs", "clip_max", default=3.0)
    # Names of TRL for other ways to sample, and to log what was sampled.
    generation_kwargs: dict[str, Any] | str | None = flat()
    vllm_model_impl: str = flat(default="vllm")
    vllm_tensor_parallel_size: int = flat(default=1)
    vllm_max_model_length: int | None = flat()
    vllm_enable_sleep_mode: bool = flat(default=False)
    vllm_group_port: int = flat(default=51216)
    use_transformers_paged: bool = flat(default=False)
    use_transformers_continuous_batching: bool = flat(default=False)
    transformers_continuous_batching_config: dict[str, Any] | str | None = flat()
    cast_lm_head_to_fp32: bool = flat(default=False)
    log_completions_hub_repo: str | None = flat()
    log_multimodal: bool = flat(default=True)

    reward_shaping_kwargs: KwargsValue = kwargs(
        "How total rewards are shaped before advantages are computed, in this order.", ShapingParams
    )
    reward_model_kwargs: KwargsValue = kwargs("How reward models score.", RewardModelParams)
    reward_weights: list[float] | None = opt(None, "Weight of each reward. By default, each weight is 1.")
    eval_reward_weights: list[float] | None = opt(
        None, "Weight of each reward in eval_reward_funcs. By default, each weight is 1.", decides=False
    )
    reward_timeout: Seconds | None = opt(
        600.0,
        "Time limit, in seconds, for one call of a reward function with a batch. None means no limit.",
        decides=False,
    )
    reward_num_workers: Annotated[int, Ge(0)] = opt(
        0,
        "Processes, for each training process, in which plain reward functions score, each the completions of one "
        "prompt at a time. By default, they run in the training process, one function after another.",
        decides=False,
    )
    on_reward_error: Literal["raise", "skip"] = opt(
        "raise",
        "What happens if a reward function fails. With 'raise', the run ends. With 'skip', the function's rewards are "
        "None for that batch, and the run ends after ten such batches in a row.",
        decides=False,
    )
    stop_without_signal: Annotated[int, Ge(1)] | None = opt(
        None,
        "End the run with an error after this many consecutive optimizer steps in which the rewards give no signal. "
        "By default, there is only a warning.",
        decides=False,
    )
    mask_truncated_completions: bool = opt(
        False, "Exclude completions that were cut off at max_completion_length from the loss (DAPO)."
    )
    dynamic_sampling: bool = opt(
        False,
        "Replace prompts whose completions all have the same reward with other prompts of the dataset (DAPO) until "
        "rewards differ within every prompt or max_tries is reached.",
    )
    dynamic_sampling_kwargs: KwargsValue = kwargs(
        "Hyperparameters of dynamic_sampling.", {True: ResamplingParams}, switch="dynamic_sampling"
    )
    curriculum: Literal["variance", "band"] | None = opt(
        None,
        "Replace prompts whose success rate p is outside a band (too easy or too hard). The replacements are sampled "
        "in proportion to p (1 - p) ('variance'), or uniformly inside the band ('band').",
    )
    curriculum_kwargs: KwargsValue = kwargs(
        "Hyperparameters of the curriculum.",
        {"variance": CurriculumParams, "band": CurriculumParams},
        switch="curriculum",
    )
    use_vllm: bool = opt(
        False, "Sample completions on a vLLM server instead of in the training process.", decides=False
    )
    vllm_mode: Literal["server", "colocate"] = opt(
        "server",
        "'server' samples on servers that have devices of their own. 'colocate' has one device for both: the command "
        "starts a server on the device of training, where it sleeps except while it samples.",
        decides=False,
        needs=["use_vllm"],
    )
    vllm_gpu_memory_utilization: Annotated[float, Gt(0), Lt(1)] | None = opt(
        None,
        "With vllm_mode='colocate': share of the GPU's memory for the server while it samples. By default, what "
        "training leaves, which prefrl doctor prints.",
        decides=False,
    )
    vllm_server_base_url: list[str] | None = opt(
        None,
        "URLs of the servers, which share the requests. The default is http://vllm_server_host:vllm_server_port. "
        "Servers that come and go are those of a folder (dir:/shared/fleet), in which prefrl vllm-serve --join "
        "registers them, or the addresses of a DNS name (dns:name:8000).",
        decides=False,
        needs=["use_vllm"],
    )
    vllm_server_host: str = opt("127.0.0.1", "Host of the server.", decides=False, needs=["use_vllm"])
    vllm_server_port: Annotated[int, Ge(1), Le(65535)] = opt(
        8000, "Port of the server.", decides=False, needs=["use_vllm"]
    )
    vllm_server_timeout: Seconds = opt(
        120.0,
        "Seconds to wait for a server that is starting, unreachable or restarting.",
        decides=False,
        needs=["use_vllm"],
    )
    vllm_guided_decoding_regex: str | None = opt(
        None, "Constrain completions to this regular expression.", needs=["use_vllm"]
    )
    vllm_kwargs: KwargsValue = kwargs(
        "Rarely changed settings of servers.",
        {True: VLLMParams},
        switch="use_vllm",
        decides=False,
        needs=["use_vllm"],
    )
    vllm_importance_sampling_correction: bool | None = opt(
        None,
        "Multiply losses by importance weights policy / sampler, because a server's log-probs differ from the "
        "trainer's and async samples come from older weights. It is on by default with a server, except when guided "
        "decoding, or truncated sampling with truncated_logprobs='softmax', makes the trainer score a distribution "
        "that differs from the sampler's.",
    )
    vllm_importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask"
    ] = opt(
        "sequence_mask",
        "How importance weights are computed and bounded. The first word is the level: the ratio of each token "
        "(token), the product of a sequence's token ratios (sequence), or their geometric mean (geometric). The "
        "second says what happens to ratios out of bounds: they are set to the bound (truncate), or their tokens are "
        "excluded from the loss (mask).",
        needs=["use_vllm"],
    )
    vllm_importance_sampling_kwargs: KwargsValue = kwargs(
        "Bounds of the importance weights.",
        {True: CorrectionParams},
        switch="corrects_sampling",
        off="sampling is not corrected. Leave vllm_importance_sampling_correction None, without guided decoding and "
        "with truncated_logprobs='exact'.",
        needs=["use_vllm"],
    )
    weight_sync: Literal["nccl", "gloo", "ipc", "shm", "adapter", "delta"] | None = opt(
        None,
        "How weights are sent to the servers: nccl (GPUs), gloo (TCP), ipc (memory of one GPU, with "
        "vllm_mode='colocate'), shm (files in a shared folder), adapter (only the LoRA weights, as files in a shared "
        "folder), delta (only what has changed, by the way that delta_over of vllm_kwargs names). The default is "
        "adapter if only an adapter is trained and there is a shared folder, and otherwise shm with "
        "vllm_mode='colocate', nccl on a GPU and gloo on a CPU.",
        decides=False,
        needs=["use_vllm"],
    )
    generation_mode: Literal["sync", "overlap", "async"] = opt(
        "sync",
        "'sync' generates first and then trains. 'overlap' trains on finished groups while other groups of the same "
        "step are still being generated; the update is the same up to rounding. 'async' generates for later steps "
        "during training, at most max_staleness steps ahead.",
        needs=["use_vllm"],
    )
    max_staleness: Annotated[int, Ge(1)] = opt(
        4,
        "With generation_mode='async': maximum age of the sampling weights, in optimizer steps, when their "
        "completions are first trained on.",
        needs=["use_vllm"],
    )
    async_kwargs: KwargsValue = kwargs(
        "Which groups training takes first, and what happens to late ones.",
        {"async": AsyncParams},
        switch="generation_mode",
        others_elsewhere=True,  # a rule refuses them in the other modes
    )
    ds3_gather_for_generation: bool = opt(
        True,
        "For partitioned models (ZeRO-3, FSDP2): keep all weights gathered on each process during generation. "
        "Otherwise, they are gathered layer by layer for every token, which is slow but needs little memory.",
        decides=False,
    )
    cache_implementation: Literal["dynamic", "offloaded", "static"] | None = opt(
        None,
        "Where the KV cache is kept: on the device ('dynamic', the default), or in host memory except for the layer "
        "that is being computed ('offloaded'). 'static' is accepted for scripts written for TRL and means 'dynamic'.",
        decides=False,
    )

    shaping_params = ParamsOf("reward_shaping_kwargs", ShapingParams)
    reward_model_params = ParamsOf("reward_model_kwargs", RewardModelParams)
    resampling_params = ParamsOf("dynamic_sampling_kwargs", ResamplingParams)
    curriculum_params = ParamsOf("curriculum_kwargs", CurriculumParams)
    vllm_params = ParamsOf("vllm_kwargs", VLLMParams)
    async_params = ParamsOf("async_kwargs", AsyncParams, if_off=True)
    correction_params = ParamsOf("vllm_importance_sampling_kwargs", CorrectionParams)

    @property
    def server_urls(self) -> list[str]:
        """Base URLs of the servers, without trailing slashes."""
        given = self.vllm_server_base_url or [f"http://{self.vllm_server_host}:{self.vllm_server_port}"]
        return [url.rstrip("/") for url in given]

    @property
    def engine_urls(self) -> list[str]:
        """Base URLs of the servers that get the weights, or a single `dir:...` or `dns:...`."""
        return [url.rstrip("/") for url in self.vllm_params.admin_urls or self.server_urls]

    @property
    def min_servers(self) -> int | None:
        """The fewest servers with which a run goes on; None: it needs all of a list that does not change."""
        is_elastic = self.vllm_params.admin_urls is not None or self.engine_urls[0].startswith((FOLDER, DNS))
        given = self.vllm_params.min_servers
        if given is not None or not is_elastic:
            return given
        return 1 if self.engine_urls[0].startswith((FOLDER, DNS)) else len(self.engine_urls)

    @property
    def servers_are_local(self) -> bool:
        """Whether all servers are reached through the loopback interface."""
        return are_local(self.server_urls + self.engine_urls)

    @property
    def shared_folder(self) -> str | None:
        """A folder that trainer and servers share; None if there is none."""
        return self.vllm_params.sync_folder or ("/dev/shm" if are_local(self.engine_urls) else None)

    @property
    def corrects_sampling(self) -> bool:
        """The effective value of `vllm_importance_sampling_correction`."""
        is_wanted = self.vllm_importance_sampling_correction
        return self.use_vllm and (not unscored(self) if is_wanted is None else is_wanted)

    @property
    def takes_old_samples(self) -> bool:
        """Whether the loss holds for completions of older weights without a correction."""
        return False
