"""Which options of policy-gradient losses and their advantages exclude each other, and those of one algorithm.

Plain values alone: the command checks them before torch is imported.
"""

from __future__ import annotations

from typing import Any

from prefrl.options.fields import Example, Rule, example, unset, when
from prefrl.options.generation_rules import cuts_of, unscored
from prefrl.options.optimizers import decay_rule, optimizer_of
from prefrl.options.policy import IN_REWARD
from prefrl.options.schedule import takes_warmup
from prefrl.options.server_rules import wrong_urls


def scales_by_batch(o: Any) -> bool:
    """Whether rewards are divided by the deviation of a whole batch."""
    return "scale_rewards" in o.advantage_params.names() and o.advantage_params.scale_rewards == "batch"


def normalizes_each_reward(o: Any) -> bool:
    """Whether each reward is normalized by itself before they are added."""
    params = o.advantage_params
    has_choice = "multi_objective_aggregation" in params.names()
    return has_choice and params.multi_objective_aggregation == "normalize_then_sum"


def _changes_totals(o: Any) -> bool:
    return o.kl_in == "reward" or o.teacher_kl_params.in_reward or not o.shaping_params.is_default


def _selects_all(o: Any) -> bool:
    params = None if o.rollout_selection is None else o.selection_params
    if params is None or "num_selected" not in params.names():
        return False
    return bool((params.num_selected or o.num_generations) >= o.num_generations)


def _has_returns(o: Any) -> bool:
    return o.turn_credit == "return" and not o.of_tokens


def _on_totals(o: Any) -> str | None:
    """An option that applies to the total rewards of completions, as text; None: none is set."""
    given = {
        "reward_shaping_kwargs": not o.shaping_params.is_default,
        f"reward_balance={o.reward_balance!r}": o.reward_balance is not None,
        "normalize_advantages=True": o.normalize_advantages,
        "scale_rewards='batch'": scales_by_batch(o),
        "multi_objective_aggregation='normalize_then_sum'": normalizes_each_reward(o),
    }
    return next((name for name, is_set in given.items() if is_set), None)


def _needs_two(why: str, example: Example, *estimators: str) -> Rule:
    """Groups need a second completion, with these estimators; with all, if none is named."""
    return when(
        lambda o: o.num_generations < 2 and (not estimators or o.advantage_estimator in estimators),
        f"num_generations={{num_generations}}: {why}. Set num_generations>=2.",
        example,
    )


LEVEL_RULES = (
    when(
        lambda o: o.importance_sampling_level not in o.levels,
        "importance_sampling_level={importance_sampling_level!r} with loss_type={loss_type!r}: this loss supports "
        "{supported}.",
        example("grpo", loss_type="gmpo", importance_sampling_level="sequence"),
        supported=lambda o: " and ".join(map(repr, sorted(o.levels))),
    ),
)
KL_RULES = (
    *unset(
        {"kl_estimator": "k1", "kl_in": "reward"},
        lambda o: o.beta == 0,
        "beta=0.0: there is no KL term. Set beta > 0.",
        example("grpo", beta=0.0),
        hint=True,
    ),
    when(
        lambda o: o.kl_estimator == "full" and o.sync_ref_model,
        "kl_estimator='full' with sync_ref_model=True: it keeps hidden states of the reference, which become outdated "
        "when the reference moves. Use another estimator, or leave sync_ref_model False.",
        example("grpo", kl_estimator="full", sync_ref_model=True),
    ),
    when(
        lambda o: o.kl_in == "reward" and o.kl_estimator not in IN_REWARD,
        "kl_estimator={kl_estimator!r} with kl_in='reward': a reward has no gradient, so only its value counts. Use "
        "'k1' (unbiased), 'k2', 'k3' or 'abs'.",
        example("grpo", kl_in="reward", kl_estimator="full"),
    ),
)
JOURNAL_RULES = (
    when(
        lambda o: o.journal_tokens and o.journal_keep == 0,
        "journal_tokens=True has no effect because journal_keep=0: no completions are kept. Set journal_keep above 0.",
        example("grpo", journal_tokens=True, journal_keep=0),
    ),
)
TEACHER_RULES = (
    *unset(
        {"teacher_model_name_or_path": "m", "teacher_model_init_kwargs": {"revision": "a"}},
        lambda o: not o.teacher_kl_coef,
        "teacher_kl_coef=0.0: nothing is learned from a teacher. Set teacher_kl_coef > 0, or leave it out.",
        example("grpo"),
    ),
    when(
        lambda o: isinstance(o.teacher_model_name_or_path, dict),
        "teacher_model_name_or_path={teacher_model_name_or_path!r}: several teachers, of which a column names one for "
        "each row, are for DistillationTrainer. Name one teacher.",
        example("grpo", teacher_kl_coef=0.5, teacher_model_name_or_path={"math": "folder"}),
    ),
    when(
        lambda o: o.beta and o.teacher_kl_coef and o.teacher_kl_params.name == o.kl_estimator == "full",
        "teacher_kl_kwargs: estimator='full' with kl_estimator='full' and beta={beta}: a pass compares the policy's "
        "whole distributions with those of one model. Use another estimator for one of the two, or beta=0.",
        example("grpo", teacher_kl_coef=0.5, kl_estimator="full", beta=0.1),
    ),
    when(
        lambda o: o.teacher_kl_coef and o.teacher_kl_params.name == "sequence" and o.reduction == "sequence_mean",
        "teacher_kl_kwargs: estimator='sequence' with loss_type={loss_type!r}: it weights sequences by 1 / length, "
        "but the KL of a sequence is a sum over its tokens. Use a loss that sums or averages over all tokens.",
        example("grpo", teacher_kl_coef=0.5, teacher_kl_kwargs={"estimator": "sequence"}, loss_type="grpo"),
    ),
)
RATIO_RULES = (
    when(
        lambda o: (
            o.of_tokens
            and (o.importance_sampling_level in ("sequence", "sequence_sum") or o.loss_type in ("gmpo", "vespo"))
        ),
        "importance_sampling_level={importance_sampling_level!r}, loss_type={loss_type!r} with token-level advantages "
        "({estimator}): a ratio of whole sequences gives every token's gradient the mean of their advantages. Use "
        "level 'token' or 'sequence_token', and another loss.",
        example("reinforce_plus_plus", importance_sampling_level="sequence"),
    ),
)
HYPERPARAMETERS_RULES = (
    when(
        lambda o: o.use_adaptive_entropy and not o.entropy_params.min <= o.entropy_coef <= o.entropy_params.max,
        "entropy_coef={entropy_coef}: must be from min {entropy_params.min} to max {entropy_params.max} of "
        "entropy_kwargs",
        example("grpo", use_adaptive_entropy=True, entropy_coef=2.0),
    ),
    when(
        lambda o: (
            o.kl_in == "reward"
            and o.beta > 0
            and "bias_correction" in o.kl_params.names()
            and o.kl_params.bias_correction
        ),
        "kl_kwargs: bias_correction=True has no effect because kl_in='reward': the ratio of the policy loss already "
        "weights the whole reward. Leave it False.",
        example("grpo", kl_in="reward", kl_kwargs={"bias_correction": True}),
    ),
    when(
        lambda o: o.kl_estimator == "sequence" and o.reduction == "sequence_mean",
        "kl_estimator='sequence' with loss_type={loss_type!r}: it weights sequences by 1 / length, but the KL of a "
        "sequence is a sum over its tokens. Use a loss that sums or averages over all tokens.",
        example("grpo", kl_estimator="sequence", loss_type="grpo"),
    ),
    when(
        lambda o: o.reward_balance is not None and o.of_tokens,
        "reward_balance={reward_balance!r} with token-level advantages ({estimator}): only advantages of completions "
        "are computed for each reward. Use GRPO or RLOO.",
        example("reinforce_plus_plus", reward_balance="nash"),
    ),
    when(
        lambda o: o.reward_balance is not None and (_changes_totals(o) or o.needs_greedy),
        "reward_balance={reward_balance!r} weights the advantages of each reward, but a KL in the reward, "
        "reward_shaping_kwargs and a greedy baseline apply to the total reward. Remove them.",
        example("grpo", reward_balance="nash", advantage_estimator="remax"),
    ),
    when(
        lambda o: o.reward_balance not in (None, "fixed") and min(o.reward_weights or [1.0]) < 0,
        "reward_weights={reward_weights}: reward_balance={reward_balance!r} needs weights >= 0. Change the sign of "
        "the reward, or use 'fixed'.",
        example("grpo", reward_balance="nash", reward_weights=[1.0, -1.0]),
    ),
    when(
        lambda o: normalizes_each_reward(o) and _changes_totals(o),
        "multi_objective_aggregation='normalize_then_sum' normalizes each reward, but a KL in the reward and "
        "reward_shaping_kwargs change the total. Use 'sum_then_normalize', or remove these.",
        example(
            "grpo",
            advantage_kwargs={"multi_objective_aggregation": "normalize_then_sum"},
            reward_shaping_kwargs={"normalize": True},
        ),
    ),
    when(
        lambda o: normalizes_each_reward(o) and o.reward_balance is not None,
        "multi_objective_aggregation='normalize_then_sum' with reward_balance={reward_balance!r}: both determine how "
        "rewards are combined. Remove one of them.",
        example(
            "grpo",
            advantage_kwargs={"multi_objective_aggregation": "normalize_then_sum"},
            reward_balance="nash",
        ),
    ),
    when(
        _selects_all,
        "selection_kwargs: num_selected={selection_params.num_selected}: must be below "
        "num_generations={num_generations} with rollout_selection={rollout_selection!r}",
        example("grpo", rollout_selection="best"),
    ),
    *unset(
        {"turn_discount": 0.5},
        lambda o: not _has_returns(o),
        "it discounts only with turn_credit='return' and advantages of completions. Set turn_credit='return'; for "
        "advantages of tokens set gamma in advantage_kwargs.",
        example("reinforce_plus_plus", turn_credit="return"),
    ),
    when(
        lambda o: _has_returns(o) and o.estimator not in ("grpo", "rloo"),
        "turn_credit='return' with advantage_estimator={estimator!r}: returns are compared with the mean of the other "
        "episodes, as only 'grpo', 'rloo' and estimators of tokens allow. Use one of these.",
        example("grpo", turn_credit="return", advantage_estimator="opo"),
    ),
    when(
        lambda o: _on_totals(o) if _has_returns(o) else None,
        "turn_credit='return' with {found}: that applies to the total reward, but each turn has its own. Remove one "
        "of the two.",
        example("grpo", turn_credit="return", normalize_advantages=True),
    ),
)
GROUP_RULES = (
    when(
        lambda o: o.num_generations < 2 and o.advantage_estimator != "remax",
        "num_generations={num_generations}: group advantages need at least 2 completions of a prompt. Set "
        "num_generations>=2.",
        example("grpo", num_generations=1),
    ),
    when(
        lambda o: o.advantage_estimator == "remax" and o.generation_mode != "sync",
        "generation_mode={generation_mode!r} with advantage_estimator='remax': its greedy completions are requested "
        "together with the others. Use generation_mode='sync'.",
        example("grpo", advantage_estimator="remax", generation_mode="overlap", use_vllm=True),
    ),
)
RLOO_RULES = (
    _needs_two("a completion is compared with the others of its prompt", example("rloo", num_generations=1)),
)
REINFORCE_PLUS_PLUS_RULES = (
    _needs_two(
        "advantage_estimator='reinforce_plus_plus_baseline' compares the completions of a prompt",
        example("reinforce_plus_plus", advantage_estimator="reinforce_plus_plus_baseline"),
        "reinforce_plus_plus_baseline",
    ),
)
CRITIC_RULES = (
    *unset(
        {"value_model_name_or_path": "m"},
        lambda o: o.critic == "head",
        "critic='head' is part of the policy. Leave critic out.",
        example("ppo", critic="head"),
    ),
    when(
        lambda o: 0 < o.max_steps <= o.critic_warmup,
        "critic_warmup={critic_warmup}: must be below max_steps={max_steps}, or the policy never learns",
        example("ppo", critic_warmup=5, max_steps=5),
    ),
    decay_rule(
        "critic_optim_kwargs: weight_decay",
        lambda o: o.critic_params.weight_decay,
        example("ppo", critic_optim_kwargs={"weight_decay": 0.1}, optim="rprop"),
    ),
    when(
        lambda o: o.critic_params.max_grad_norm is not None and o.max_grad_norm == 0,
        "critic_optim_kwargs: max_grad_norm has no effect because max_grad_norm=0 turns clipping off. Set "
        "max_grad_norm to a norm that the policy's gradients do not reach, such as 1e9.",
        example("ppo", critic_optim_kwargs={"max_grad_norm": 1.0}, max_grad_norm=0.0),
    ),
    when(
        lambda o: o.critic_params.warmup_steps is not None and not takes_warmup(o),
        "critic_optim_kwargs: warmup_steps={critic_params.warmup_steps} has no effect because "
        "lr_scheduler_type={lr_scheduler_type!r} does not read it. Choose another schedule, such as "
        "'constant_with_warmup'.",
        example("ppo", critic_optim_kwargs={"warmup_steps": 2}, lr_scheduler_type="constant"),
    ),
    when(
        lambda o: o.critic_warmup and optimizer_of(o) == "asgd",
        "critic_warmup={critic_warmup} with optim='asgd', which also shrinks weights without gradients, such as the "
        "policy's. Set critic_warmup=0, or choose another optimizer.",
        example("ppo", critic_warmup=2, optim="asgd"),
    ),
)
PAIRS_RULES = (
    when(
        lambda o: o.router_replay == "R2",
        "router_replay='R2': this loss has no old log-probs, whose experts it would replay. Set router_replay='R3'.",
        example("online_dpo", router_replay="R2", num_iterations=2),
    ),
    when(
        lambda o: o.max_length is not None and o.max_length <= (o.max_completion_length or o.max_length),
        "max_length={max_length} with max_completion_length={max_completion_length}: it bounds prompt and completion "
        "together, and no token is left for the prompt. Set max_completion_length to a number below max_length.",
        example("online_dpo", max_length=256),
    ),
    when(
        lambda o: o.use_vllm and o.generation_mode == "async",
        "generation_mode='async': online DPO does not correct for samples of older weights. Use 'sync' or 'overlap'.",
        example("online_dpo", use_vllm=True, generation_mode="async"),
    ),
    _needs_two("a pair needs at least 2 completions of a prompt", example("online_dpo", num_generations=1)),
    when(
        lambda o: o.vllm_importance_sampling_correction,
        "vllm_importance_sampling_correction=True has no effect because pairs are trained on like those of a dataset. "
        "Leave it None.",
        example("online_dpo", use_vllm=True, vllm_importance_sampling_correction=True),
    ),
)


def _other_than_sampled(o: Any) -> str:
    """Options with which completions are not sampled from the student's whole distribution, as text."""
    if o.on_policy_fraction < 1:
        return f"on_policy_fraction={o.on_policy_fraction}"
    if o.use_vllm:
        return unscored(o)
    return ", ".join(f"{name}={value!r}" for name, value in cuts_of(o).items())


def _unusable_teachers(o: Any) -> bool:
    """Whether teachers by name are not what they must be."""
    given = o.teacher_model_name_or_path
    return isinstance(given, dict) and not (given and all(isinstance(path, str) and path for path in given.values()))


_SERVED: dict[str, Any] = {"teacher_server_base_url": ["http://a:1"]}
DISTILLATION_RULES = (
    when(
        lambda o: o.router_replay == "R2",
        "router_replay='R2': this loss has no old log-probs, whose experts it would replay. Set router_replay='R3'.",
        example("distillation", router_replay="R2", num_iterations=2),
    ),
    when(
        lambda o: wrong_urls(o.teacher_urls),
        "teacher_server_base_url={found[0]!r}: must be like http://host:8000, without a path or user name.",
        example("distillation", teacher_server_base_url=["ftp://host"]),
    ),
    when(
        lambda o: len({*o.teacher_urls}) < len(o.teacher_urls),
        "teacher_server_base_url={teacher_server_base_url}: contains a server twice. Remove one.",
        example("distillation", teacher_server_base_url=["http://a:1", "http://a:1/"]),
    ),
    when(
        lambda o: o.has_teacher_server and o.temperature != 1,
        "temperature={temperature} with teacher_server_base_url: vLLM returns a teacher's log-probs at temperature 1, "
        "whatever is asked for, and student and teacher are compared at the same temperature. Set temperature=1, or "
        "teacher_model_name_or_path.",
        example("distillation", **_SERVED, temperature=0.5),
    ),
    when(
        lambda o: o.has_teacher_server and o.repetition_penalty != 1,
        "repetition_penalty={repetition_penalty} with teacher_server_base_url: it changes the logits of a teacher, of "
        "which a server returns only the likeliest. Set repetition_penalty=1, or teacher_model_name_or_path.",
        example("distillation", **_SERVED, repetition_penalty=1.1),
    ),
    *unset(
        {
            "teacher_model_name_or_path": "b",
            "teacher_model_init_kwargs": {"dtype": "bfloat16"},
            "teacher_weights": "ema",
        },
        lambda o: o.has_teacher_server,
        "the teacher is on the servers of teacher_server_base_url. Leave one of them out.",
        example("distillation", **_SERVED),
    ),
    when(
        _unusable_teachers,
        "teacher_model_name_or_path={teacher_model_name_or_path!r}: must be the name or folder of a model, or a "
        "mapping such as {{'math': 'folder', 'code': 'other_folder'}}, whose keys are the values of the dataset's "
        "column teacher.",
        example("distillation", teacher_model_name_or_path={"math": 1}),
    ),
    when(
        lambda o: o.teacher_weights != "frozen" and o.teacher_model_name_or_path is not None,
        "teacher_weights={teacher_weights!r} with teacher_model_name_or_path={teacher_model_name_or_path!r}: only a "
        "teacher that is the student itself moves with it. Leave one of them out.",
        example("distillation", teacher_weights="ema", teacher_prompt="hint", teacher_model_name_or_path="m"),
    ),
    when(
        lambda o: o.teacher_weights != "frozen" and o.teacher_prompt is None,
        "teacher_weights={teacher_weights!r} without teacher_prompt: the teacher is the student and sees the same "
        "prompt, so there is nothing to learn from. Set teacher_prompt, or a teacher.",
        example("distillation", teacher_weights="live"),
    ),
    when(
        lambda o: o.teacher_prompt == "prompt",
        "teacher_prompt='prompt': the teacher sees the student's prompt anyway. Name another column, or leave "
        "teacher_prompt out.",
        example("distillation", teacher_prompt="prompt"),
    ),
    when(
        lambda o: o.later_tokens and o.beta < 1,
        "later_tokens=True with beta={beta}: only the reverse KL is a mean over what the student samples. Set beta=1, "
        "or leave later_tokens False.",
        example("distillation", later_tokens=True, num_generations=2, beta=0.5),
    ),
    when(
        lambda o: o.later_tokens and o.num_generations < 2,
        "later_tokens=True with num_generations={num_generations}: the completions of a prompt are compared with each "
        "other, or the gradient is too noisy. Set num_generations>=2.",
        example("distillation", later_tokens=True),
    ),
    when(
        lambda o: _other_than_sampled(o) if o.later_tokens else None,
        "later_tokens=True with {found}: the importance weights of completions need their probability under the "
        "student, so all of them must be sampled from its whole distribution. Remove it, or leave later_tokens False.",
        example("distillation", later_tokens=True, num_generations=2, top_k=50),
    ),
    when(
        lambda o: o.later_tokens and o.generation_mode != "sync",
        "later_tokens=True with generation_mode={generation_mode!r}: importance weights of whole completions vary too "
        "much with samples of older weights. Use generation_mode='sync', or leave later_tokens False.",
        example("distillation", later_tokens=True, num_generations=2, use_vllm=True, generation_mode="async"),
    ),
    when(
        lambda o: (
            o.later_tokens
            and isinstance(o.per_device_train_batch_size, int)
            and o.per_device_train_batch_size % o.num_generations
        ),
        "later_tokens=True with per_device_train_batch_size={per_device_train_batch_size} and "
        "num_generations={num_generations}: all completions of a prompt must be in one step. Set "
        "per_device_train_batch_size to a multiple of num_generations.",
        example("distillation", later_tokens=True, num_generations=4, per_device_train_batch_size=6),
    ),
    when(
        lambda o: o.on_policy_fraction < 1 and o.async_params.order == "ready",
        "on_policy_fraction={on_policy_fraction} with async_kwargs: order='ready': completions of the dataset would "
        "always be the first that are ready. Use order='in_order', or set on_policy_fraction=1.",
        example(
            "distillation",
            on_policy_fraction=0.5,
            use_vllm=True,
            generation_mode="async",
            async_kwargs={"order": "ready"},
        ),
    ),
    when(
        lambda o: o.on_policy_fraction < 1 and o.num_generations > 1,
        "on_policy_fraction={on_policy_fraction} with num_generations={num_generations}: the dataset has one "
        "completion of each prompt. Set num_generations=1.",
        example("distillation", on_policy_fraction=0.5, num_generations=2),
    ),
    when(
        lambda o: o.vllm_importance_sampling_correction,
        "vllm_importance_sampling_correction=True has no effect because the divergence from the teacher holds for "
        "tokens of any sampler, and later_tokens has weights of its own. Leave it None.",
        example("distillation", use_vllm=True, vllm_importance_sampling_correction=True),
    ),
    *unset(
        {"reward_shaping_kwargs": {"normalize": True}, "stop_without_signal": 3},
        lambda o: True,
        "rewards are only logged, and the teacher is what is learned from. Leave it out.",
        example("distillation"),
        hint=True,
    ),
)
MOVING_TEACHER_RULES = (
    when(
        lambda o: o.teacher_weights != "frozen" and o.steps_of_a_generation > 1,
        "teacher_weights={teacher_weights!r} with {steps_of_a_generation} updates from a generation batch: a batch is "
        "scored once, and the teacher's weights would have moved before its last update. Set num_iterations=1 and "
        "leave steps_per_generation out, or use teacher_weights='frozen'.",
        example("distillation", teacher_weights="live", teacher_prompt="hint", num_iterations=2),
    ),
)
