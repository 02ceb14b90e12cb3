"""The models, references and errors of preference trainers."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from prefrl import ConfigError, DataError, GRPOConfig, GRPOTrainer, PrefrlError
from prefrl.registry import REGISTRY
from prefrl.rewards import ModelReward
from tests.assets import tiny_reward_model, tiny_tokenizer
from tests.contract.cases import dataset_of, make_trainer, model_of, relative_difference, stopping_model, update_of

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "gsm8k_pairs_8.jsonl").read_text(encoding="utf-8").splitlines()
]
DPO_METRICS = {
    "entropy",
    "num_tokens",
    "logits/chosen",
    "logits/rejected",
    "logps/chosen",
    "logps/rejected",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "mean_token_accuracy",
}
METRICS = {
    "dpo": DPO_METRICS,
    "kto": (DPO_METRICS | {"kl"}) - {"rewards/accuracies", "mean_token_accuracy"},
    "bco": DPO_METRICS - {"rewards/accuracies", "mean_token_accuracy"},
    "orpo": DPO_METRICS | {"nll_loss", "log_odds_ratio", "log_odds_chosen"},
    "cpo": DPO_METRICS | {"nll_loss"},
    "reward": {"num_tokens", "min_reward", "mean_reward", "max_reward", "accuracy", "margin"},
}

# With log pi = log ref every log-ratio is 0.
FIRST_LOSSES: list[Any] = [
    ("dpo", {"loss_type": "sigmoid"}, math.log(2)),
    ("dpo", {"loss_type": "hinge"}, 1.0),
    ("dpo", {"loss_type": "ipo", "beta": 0.5}, 1.0),
    ("dpo", {"loss_type": "exo_pair", "label_smoothing": 0.25}, 0.5 * math.log(0.25 / 0.75) + math.log(0.5 / 0.25)),
    ("dpo", {"loss_type": "nca_pair"}, 2 * math.log(2)),
    ("dpo", {"loss_type": "robust", "label_smoothing": 0.25}, math.log(2)),
    ("dpo", {"loss_type": "bco_pair"}, 2 * math.log(2)),
    ("dpo", {"loss_type": "sppo_hard", "beta": 0.5}, 2.0),
    ("dpo", {"loss_type": "aot"}, math.log(2)),
    ("dpo", {"loss_type": "aot_unpaired"}, math.log(2)),
    ("dpo", {"loss_type": "apo_zero"}, 1.0),
    ("dpo", {"loss_type": "apo_down"}, 1.0),
    ("dpo", {"loss_type": "discopop"}, 0.5 * math.log(2) + 0.5),
    ("dpo", {"loss_type": "sigmoid_norm"}, math.log(2)),
    ("dpo", {"loss_type": ["sigmoid", "hinge"], "loss_weights": [0.5, 2.0]}, 0.5 * math.log(2) + 2.0),
    ("dpo", {"loss_type": "sigmoid", "f_divergence_type": "forward_kl"}, math.log(2)),
    (  # 3 of the 8 rows are desirable
        "kto",
        {"desirable_weight": 3.0, "undesirable_weight": 0.5, "train_sampling_strategy": "sequential"},
        0.5 * (3 * 3.0 + 5 * 0.5) / 8,
    ),
    ("kto", {"loss_type": "apo_zero_unpaired"}, 0.5),
    ("bco", {}, math.log(2)),
    ("online_dpo", {}, math.log(2)),
]


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("name", "options", "expected"), FIRST_LOSSES, ids=str)
def test_the_first_loss_is_known(name: str, options: dict[str, Any], expected: float, tmp_path: Path) -> None:
    assert losses_of(make_trainer(name, tmp_path, **options))[0] == pytest.approx(expected, abs=2e-6)


UNIFORM: list[Any] = [
    ("dpo", {"rpo_alpha": 0.5}, math.log(2) + 0.5 * math.log(128)),
    ("dpo", {"loss_type": ["sigmoid", "sft"]}, math.log(2) + math.log(128)),
    ("orpo", {}, math.log(128) + 0.1 * math.log(2)),
    ("cpo", {"loss_type": "simpo"}, math.log(128) + math.log(1 + math.exp(0.5))),
    ("cpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.0}, math.log(2)),
    ("reward", {}, math.log(2)),
]


@pytest.mark.parametrize(("name", "options", "expected"), UNIFORM, ids=str)
def test_the_first_loss_of_a_model_whose_head_is_zero_is_known(
    name: str, options: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    """Every token has probability 1 / 128, every reward is 0."""
    model: Any = model_of(name)
    (model.score if name == "reward" else model.get_output_embeddings()).weight.data.zero_()
    rows = dataset_of(name).select_columns(["prompt", "chosen", "rejected"])
    trainer = make_trainer(name, tmp_path, model=model, train_dataset=rows, **options)
    assert losses_of(trainer)[0] == pytest.approx(expected, abs=1e-6)


def test_rewards_of_alphapo_are_the_transformed_probabilities(tmp_path: Path) -> None:
    """Every token has probability p = 1 / 128: beta (1 - p^-alpha) / alpha."""
    model: Any = model_of("cpo")
    model.get_output_embeddings().weight.data.zero_()
    trainer = make_trainer("cpo", tmp_path, model=model, loss_type="alphapo", alpha=0.5, beta=0.1)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/chosen"] == pytest.approx(0.1 * (1 - 128**0.5) / 0.5, rel=1e-5)


def test_likelihood_terms_count_all_tokens_of_a_response(tmp_path: Path) -> None:
    """LD-DPO's weight is for the log-ratios alone: with log pi = log ref they are 0 and the likelihood remains."""
    options = {"loss_type": ["sigmoid", "sft"], "rpo_alpha": 0.5}
    plain = losses_of(make_trainer("dpo", tmp_path, **options))[0]
    assert losses_of(make_trainer("dpo", tmp_path, **options, ld_alpha=0.1))[0] == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("name", METRICS)
def test_metrics_have_their_names(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(name, tmp_path, eval_dataset=dataset_of(name, 5))
    trainer.train()
    of_every_trainer = {"loss", "grad_norm", "learning_rate", "epoch", "step", "step_time"}
    logged = {key for key in trainer.state.log_history[0] if not key.startswith("time/")} - of_every_trainer
    assert logged == METRICS[name]
    assert {key.removeprefix("eval_") for key in trainer.evaluate()} >= METRICS[name] - {"num_tokens"}


def test_after_sft_in_the_same_process_the_reference_is_its_result(tmp_path: Path) -> None:
    model = stopping_model()
    sft = make_trainer("sft", tmp_path, model=model, max_steps=4, learning_rate=0.3)
    sft.train()
    dpo = make_trainer("dpo", tmp_path, model=sft.model)
    assert losses_of(dpo)[0] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("peft", [False, True])
def test_a_given_reference_model_is_compared_with(peft: bool, tmp_path: Path) -> None:
    given = stopping_model(seed=5)
    extra = {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])} if peft else {}
    own = make_trainer("dpo", tmp_path, **extra)
    other = make_trainer("dpo", tmp_path, ref_model=given, **extra)
    before = copy.deepcopy(given.state_dict())
    assert losses_of(own)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(losses_of(other)[0] - math.log(2)) > 1e-2
    assert all(torch.equal(value, before[key]) for key, value in given.state_dict().items())


@pytest.mark.parametrize("name", ["dpo", "kto", "bco"])
@pytest.mark.parametrize("given", [False, True])
def test_precomputed_reference_gives_the_same_update(name: str, given: bool, tmp_path: Path) -> None:
    def update(**options: Any) -> torch.Tensor:
        extra = {"ref_model": stopping_model(seed=5)} if given else {}
        return update_of(make_trainer(name, tmp_path, max_steps=2, **options, **extra))

    assert relative_difference(update(precompute_ref_log_probs=True), update()) < 1e-5


# Numbers of rows that no other case has, so that no score comes from the cache.
@pytest.mark.parametrize(
    ("kind", "rows"), [("own weights", [3]), ("adapter", [4, 5]), ("trained adapter", [6, 7]), ("given", [8, 9])]
)
def test_datasets_given_to_evaluate_are_scored_with_the_reference(kind: str, rows: list[int], tmp_path: Path) -> None:
    def trainer_of(**options: Any) -> Any:
        extra: dict[str, Any] = {"ref_model": stopping_model(seed=5)} if kind == "given" else {}
        if "adapter" in kind:
            extra["peft_config"] = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=kind == "adapter")
        return make_trainer("dpo", tmp_path, max_steps=1, learning_rate=0.1, **extra, **options)

    def metrics_of(trainer: Any, num_rows: int) -> dict[str, float]:
        metrics = trainer.evaluate({"other": dataset_of("dpo", num_rows)})
        return {name: metrics[f"eval_other_{name}"] for name in ("loss", "rewards/chosen", "rewards/margins")}

    kept, precomputed = trainer_of(), trainer_of(precompute_ref_log_probs=True)
    for num_rows in rows:  # before and after training
        assert metrics_of(precomputed, num_rows) == pytest.approx(metrics_of(kept, num_rows), abs=1e-5)
        assert precomputed.reference is None
        for trainer in (kept, precomputed):
            trainer.train()


@pytest.mark.parametrize("by_name", [False, True])
def test_a_dataset_cannot_be_scored_once_the_reference_is_gone(by_name: bool, tmp_path: Path) -> None:
    extra: dict[str, Any] = {}
    if by_name:
        stopping_model(seed=5).save_pretrained(tmp_path / "reference")
        extra["ref_model"] = str(tmp_path / "reference")
    evaluated = dataset_of("dpo", 5)
    trainer = make_trainer(
        "dpo", tmp_path, max_steps=1, precompute_ref_log_probs=True, eval_dataset=evaluated, **extra
    )
    trainer.train()
    trainer.evaluate()
    with pytest.raises(ConfigError, match="precompute_ref_log_probs=True: the reference model was not kept"):
        trainer.evaluate(dataset_of("dpo", 3))


@pytest.mark.parametrize(
    ("name", "options"), [("dpo", {}), ("dpo", {"precompute_ref_log_probs": True}), ("grpo", {"beta": 0.1})], ids=str
)
def test_resume_against_another_reference_is_refused(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    settings = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, **options}
    make_trainer(name, tmp_path, **settings).train()
    other = make_trainer(name, tmp_path, model=stopping_model(seed=3), **settings)
    with pytest.raises(ConfigError, match=r"another reference: .* Construct the trainer with the model"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "reward"])
def test_a_stream_gives_the_update_of_the_dataset(name: str, tmp_path: Path) -> None:
    options = {"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    dataset = dataset_of(name)
    plain = update_of(make_trainer(name, tmp_path, **options, train_sampling_strategy="sequential"))
    streamed = update_of(make_trainer(name, tmp_path, **options, train_dataset=dataset.to_iterable_dataset()))
    assert torch.equal(streamed, plain)


def test_a_resumed_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    """In its second pass: 12 rows are a step of 8 and one of 4."""

    def trainer() -> Any:
        return make_trainer(
            "dpo",
            tmp_path,
            max_steps=5,
            save_strategy="steps",
            save_steps=3,
            train_dataset=dataset_of("dpo", 12).to_iterable_dataset(),
            optim="adamw_torch",
        )

    whole = update_of(trainer())
    assert torch.equal(update_of(trainer(), resume_from_checkpoint=str(tmp_path / "checkpoint-3")), whole)


def test_dropout_is_off_unless_asked_for(tmp_path: Path) -> None:
    def update(**options: Any) -> torch.Tensor:
        return update_of(make_trainer("dpo", tmp_path, model=stopping_model(attention_dropout=0.5), **options))

    assert torch.equal(update(), update_of(make_trainer("dpo", tmp_path)))
    assert not torch.equal(update(disable_dropout=False), update())


def _rewards_of(trainer: Any, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[B] rewards of all rows under the trainer's model, and [B] +1 or -1 by their side."""
    (batch,) = trainer.prepare_step([trainer.lay_out(list(trainer.train_dataset))])
    with torch.no_grad():
        log_ratio = trainer.scorer.of_policy(batch).logprobs - batch.ref_logprobs
    rows = torch.stack([part.sum() for part in torch.split(log_ratio, list(batch.response_lengths))])
    return beta * rows, torch.tensor([1.0 if side else -1.0 for side in batch.is_preferred])


@pytest.mark.parametrize(("name", "options"), [("bco", {}), ("dpo", {"loss_type": "bco_pair"})])
def test_rewards_are_compared_with_the_mean_of_earlier_steps(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The model does not move, so that every step has the same 8 rows and rewards."""
    settings = {"rows": 8, "max_steps": 3, "learning_rate": 0.0, "beta": 0.3, "ref_model": stopping_model(seed=5)}
    trainer = make_trainer(name, tmp_path, **settings, **options)
    losses = losses_of(trainer)
    rewards, sign = _rewards_of(trainer, beta=0.3)
    means = [0.0, float(rewards.mean()), float(rewards.mean())]
    expected = [float(-torch.nn.functional.logsigmoid(sign * (rewards - mean)).sum()) / 8 for mean in means]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert abs(losses[1] - losses[0]) > 1e-3
    assert trainer.state.log_history[0]["rewards/chosen"] == pytest.approx(float(rewards[sign > 0].mean()), rel=1e-5)


def test_evaluation_adds_nothing_to_the_mean_of_rewards(tmp_path: Path) -> None:
    options = {"loss_type": "bco_pair", "ref_model": stopping_model(seed=5), "eval_dataset": dataset_of("dpo", 5)}
    trainer: Any = make_trainer("dpo", tmp_path, **options)
    trainer.evaluate()
    trainer.reward_mean.fold()
    assert trainer.reward_mean.value == 0.0


def test_frozen_passes_have_no_dropout(tmp_path: Path) -> None:
    model = stopping_model(attention_dropout=0.5)
    trainer: Any = make_trainer("kto", tmp_path, model=model, disable_dropout=False)
    trainer.model.train()
    batch = trainer.lay_out([trainer.train_dataset[0]])
    assert torch.equal(trainer.scorer.of_policy(batch).logprobs, trainer.scorer.of_policy(batch).logprobs)


def test_bco_weighs_undesirable_rows_by_their_density_ratio(tmp_path: Path) -> None:
    """Prompts with an 'x' are desirable only, those with a 'y' undesirable only: the ratio is at its lowest."""
    rows = [{"prompt": f"{'x' if i % 2 else 'y'}{i}", "completion": "abc", "label": bool(i % 2)} for i in range(16)]

    def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return 50.0 * torch.nn.functional.one_hot(input_ids[:, 0], 128).float()

    trainer = make_trainer(
        "bco",
        tmp_path,
        train_dataset=Dataset.from_list(rows),
        min_density_ratio=0.25,
        embedding_func=embed,
        embedding_tokenizer=tiny_tokenizer(),
    )
    # Desirable rows weigh 1 and undesirable ones 0.25; every loss is ln 2.
    losses = {row["label"]: row["weight"] for row in trainer.train_dataset}
    assert losses == {True: 1.0, False: 0.25}
    labels = [row["label"] for row in next(iter(_rows_of_first_step(trainer)))]
    expected = math.log(2) * sum(1.0 if label else 0.25 for label in labels) / 8
    assert losses_of(trainer)[0] == pytest.approx(expected, abs=1e-6)


def _rows_of_first_step(trainer: Any) -> Any:
    loader = trainer.get_train_dataloader()
    yield from ([trainer.train_dataset[i] for i in indices] for indices in loader.batch_sampler)


def test_centering_adds_the_squared_sum_of_both_rewards(tmp_path: Path) -> None:
    trainer: Any = make_trainer("reward", tmp_path, center_rewards_coefficient=0.1)
    batch = trainer.lay_out(list(trainer.train_dataset)[:3])
    with torch.no_grad():
        centered = trainer.loss(trainer.policy, batch).total
        trainer.args.center_rewards_coefficient = None
        plain = trainer.loss(trainer.policy, batch).total
        rewards = trainer.rewards(trainer.policy, batch)
    chosen, rejected = (rewards[rows] for rows in batch.pair_index)
    torch.testing.assert_close(centered - plain, 0.1 * (chosen + rejected).square().sum(), atol=1e-5, rtol=1e-4)


def test_a_reward_model_that_was_trained_here_is_a_reward_by_path(tmp_path: Path) -> None:
    trainer = make_trainer("reward", tmp_path, train_dataset=Dataset.from_list(PAIRS), max_length=None)
    trainer.train()
    trainer.save_model(str(tmp_path / "rm"))
    grpo = GRPOTrainer(
        stopping_model(),
        str(tmp_path / "rm"),
        GRPOConfig(
            output_dir=str(tmp_path / "grpo"),
            use_cpu=True,
            max_steps=1,
            num_generations=4,
            max_completion_length=8,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
        ),
        Dataset.from_list([{"prompt": row["prompt"]} for row in PAIRS]),
        processing_class=tiny_tokenizer(),
    )
    grpo.train()
    assert "rewards/rm/mean" in grpo.state.log_history[0]


def test_a_reward_model_that_is_not_trained_yet_knows_its_padding_too(tmp_path: Path) -> None:
    trainer: Any = make_trainer("reward", tmp_path, model=tiny_reward_model(pad_token_id=None))
    assert trainer.policy.config.pad_token_id == tiny_tokenizer().pad_token_id


def test_tokens_of_a_reward_model_are_those_of_its_texts(tmp_path: Path) -> None:
    trainer: Any = make_trainer("reward", tmp_path, rows=8)
    trainer.train()
    sides = [row[side] for row in trainer.train_dataset for side in ("chosen_ids", "rejected_ids")]
    assert trainer.state.log_history[0]["num_tokens"] == sum(map(len, sides))


@pytest.mark.parametrize("padding", ["<|pad|>", "<|end|>"])  # a token of its own, and the end token
def test_a_reward_by_path_is_what_was_trained(padding: str, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = padding
    trainer: Any = make_trainer(
        "reward", tmp_path, model=tiny_reward_model(pad_token_id=None), processing_class=tokenizer
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "rm"))
    rows = list(dataset_of("reward", 4))
    prepared = trainer.prepare_dataset(dataset_of("reward", 4), tokenizer, training=False)
    with torch.no_grad():
        expected = trainer.rewards(trainer.model.eval(), trainer.lay_out(list(prepared))).tolist()
    reward = ModelReward(tmp_path / "rm", tokenizer=tokenizer)
    prompts = [row["prompt"] for row in rows for _ in range(2)]
    sides = [row[side] for row in rows for side in ("chosen", "rejected")]
    assert reward(prompts, sides) == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in expected}) > 4


@pytest.mark.parametrize("name", ["dpo", "orpo", "cpo", "reward"])
def test_real_pairs_are_learned(name: str, tmp_path: Path) -> None:
    """8 pairs of right and wrong GSM8K solutions: after 12 steps on them they are told apart."""
    key = "accuracy" if name == "reward" else "rewards/accuracies"
    trainer = make_trainer(
        name,
        tmp_path,
        train_dataset=Dataset.from_list(PAIRS),
        eval_dataset=Dataset.from_list(PAIRS),
        max_steps=12,
        optim="adamw_torch",
        learning_rate=3e-3,
    )
    before = trainer.evaluate()[f"eval_{key}"]
    trainer.train()
    assert trainer.evaluate()[f"eval_{key}"] == 1.0 > before


@pytest.mark.parametrize("name", ["kto", "bco"])
def test_real_labels_are_learned(name: str, tmp_path: Path) -> None:
    """The same solutions one by one, converted from pairs."""
    trainer = make_trainer(
        name,
        tmp_path,
        train_dataset=Dataset.from_list(PAIRS),
        eval_dataset=Dataset.from_list(PAIRS),
        max_steps=12,
        optim="adamw_torch",
        learning_rate=3e-3,
    )
    assert trainer.evaluate()["eval_rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    trainer.train()
    assert trainer.evaluate()["eval_rewards/margins"] > 0.5


# Bad input.

PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
BAD_DATA: list[Any] = [
    pytest.param("dpo", [{"prompt": "a", "chosen": "b"}], {}, "'rejected'.*missing", id="missing column"),
    pytest.param("dpo", [PAIR, {**PAIR, "chosen": ""}], {}, r"1 of 2 rows.*row 1.*chosen", id="empty chosen"),
    pytest.param("dpo", [PAIR, {**PAIR, "rejected": None}], {}, "row 1.*rejected", id="None rejected"),
    pytest.param("dpo", [PAIR, {**PAIR, "rejected": "2"}], {}, "row 1.*chosen.*rejected", id="equal sides"),
    pytest.param("orpo", [PAIR, {**PAIR, "rejected": "2"}], {}, "row 1", id="equal sides orpo"),
    pytest.param("dpo", [{"chosen": "abc", "rejected": "xyz"}], {}, "row 0.*common", id="no common start"),
    pytest.param(
        "dpo", [PAIR, {**PAIR, "prompt": "x" * 50}], {"max_length": 20}, "row 1.*max_length", id="long prompt"
    ),
    pytest.param(
        "reward", [PAIR, {**PAIR, "chosen": "x" * 50}], {"max_length": 20}, "row 1.*20", id="long reward pair"
    ),
    pytest.param("kto", [{"prompt": "a", "completion": "b"}], {}, "label", id="missing label"),
    pytest.param("kto", [{"prompt": "a", "completion": "b", "label": 3}] * 2, {}, "label", id="label 3"),
    pytest.param(
        "kto", [{"prompt": "a", "completion": c, "label": True} for c in "bc"], {}, "prompt", id="one prompt for KL"
    ),
]


@pytest.mark.parametrize(("name", "rows", "options", "message"), BAD_DATA)
def test_bad_rows_are_named(
    name: str, rows: list[dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"(?s){message}"):
        make_trainer(name, tmp_path, train_dataset=Dataset.from_list(rows), **options)


def test_bad_rows_are_dropped_only_if_the_user_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_list([PAIR, {**PAIR, "chosen": ""}, {**PAIR, "prompt": "2-1="}])
    trainer: Any = make_trainer("dpo", tmp_path, train_dataset=rows, invalid_rows="drop")
    assert len(trainer.train_dataset) == 2
    assert "row 1" in caplog.text


BAD_OPTIONS: list[Any] = [
    pytest.param("dpo", {"loss_type": []}, "one or several", id="no loss"),
    pytest.param("dpo", {"beta": 0.0}, "beta=0.0", id="beta"),
    pytest.param("cpo", {"simpo_gamma": 1.0}, "simpo_gamma=1.0 has no effect", id="gamma"),
    pytest.param(
        "bco",
        {"prompt_sample_size": 4, "strict_options": True},
        "prompt_sample_size=4 has no effect",
        id="no embedding",
    ),
    pytest.param("bco", {"embedding_func": print}, "embedding_tokenizer", id="half an embedding"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD_OPTIONS)
def test_options_that_cannot_work_are_refused(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make_trainer(name, tmp_path, **options)


def test_a_reference_that_is_the_policy_is_refused(tmp_path: Path) -> None:
    model = stopping_model()
    with pytest.raises(ConfigError, match="ref_model=None"):
        make_trainer("dpo", tmp_path, model=model, ref_model=model)


@pytest.mark.parametrize("name", ["sft", "orpo", "cpo", "reward"])
def test_trainers_without_a_reference_take_none(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no argument 'ref_model'\. Leave it out"):
        make_trainer(name, tmp_path, ref_model=stopping_model())


def test_an_argument_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DPOTrainer has no argument 'num_layers'"):
        REGISTRY["dpo"].load_trainer()(stopping_model(), train_dataset=dataset_of("dpo"), num_layers=1)


def test_a_model_without_a_score_head_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(PrefrlError, match="num_labels"):
        make_trainer("reward", tmp_path, model=stopping_model())


def test_a_stream_cannot_be_precomputed_and_needs_a_number_of_steps(tmp_path: Path) -> None:
    stream = dataset_of("dpo").to_iterable_dataset()
    with pytest.raises(ConfigError, match="precompute_ref_log_probs=True with an IterableDataset"):
        make_trainer("dpo", tmp_path, train_dataset=stream, precompute_ref_log_probs=True)
    with pytest.raises(ConfigError, match="max_steps"):
        make_trainer("dpo", tmp_path, train_dataset=stream, max_steps=-1)
    with pytest.raises(ConfigError, match="dataloader_num_workers=1"):
        make_trainer("dpo", tmp_path, train_dataset=stream, dataloader_num_workers=1, strict_options=True).train()


def test_kto_says_when_its_kl_comes_from_one_row_and_when_labels_are_one_sided(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer("kto", tmp_path, per_device_train_batch_size=1)
    assert "per_device_train_batch_size=1" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        rows = dataset_of("kto").map(lambda row: {"label": True})
        make_trainer("kto", tmp_path, train_dataset=rows)
    assert "label" in caplog.text


def test_the_kl_of_kto_is_never_negative(tmp_path: Path) -> None:
    """Here the mean of log policy - log reference over mismatched rows is below 0."""
    trainer = make_trainer("kto", tmp_path, model=stopping_model(seed=5), ref_model=stopping_model(), beta=0.01)
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0.0


@pytest.mark.parametrize("size", [1, 8])
def test_kto_learns_with_any_batch_size(size: int, tmp_path: Path) -> None:
    trainer = make_trainer("kto", tmp_path, model=model_of("kto"), per_device_train_batch_size=size, max_steps=2)
    assert update_of(trainer).norm() > 1e-3
