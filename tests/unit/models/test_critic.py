"""Critics: a head on the policy, and a model of its own, laid out by every plan."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from prefrl.errors import ConfigError
from prefrl.models import critic as critic_module
from prefrl.models import scoring
from prefrl.models.classifier import sequence_scores
from prefrl.models.critic import Critic, HeadCritic, ModelCritic, ValueHead, value_model
from prefrl.models.forward import in_pieces, token_logprobs
from prefrl.models.modes import checkpoint_activations
from prefrl.models.plans import lay_out
from prefrl.models.scoring import prepare_for_scoring
from prefrl.types import TokenBatch
from tests.assets import ragged_batch, tiny_model, tiny_reward_model
from tests.unit.models.test_forward import single_process_group as single_process_group

peft = pytest.importorskip("peft")

PLANS = ["shared_prefix", "packed", "padded"]
ARCHITECTURES = [
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("gpt2", {}, id="gpt2"),
    pytest.param("llama", {"attn_implementation": "eager"}, id="llama-eager"),
    pytest.param("mistral", {"sliding_window": 4}, id="mistral-window-4"),
]


BATCH = ragged_batch()


def policy_model(architecture: str = "qwen2", **overrides: object) -> PreTrainedModel:
    model = tiny_model(architecture, **overrides)
    prepare_for_scoring(model)
    return model


def lora_policy(*, trained: bool = True, **options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = peft.LoraConfig(**({"target_modules": "all-linear", "r": 4, "init_lora_weights": not trained} | options))
    model = peft.get_peft_model(tiny_model("llama"), config)
    prepare_for_scoring(model)
    return model.eval()  # type: ignore[no-any-return]


def randomize(module: nn.Module, seed: int = 3) -> None:
    """A head as if it had learned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def head_critic(policy: PreTrainedModel, *, detach_trunk: bool = False, plan: str = "auto") -> HeadCritic:
    critic = HeadCritic(policy, detach_trunk=detach_trunk, plan=plan)
    randomize(critic.module)
    return critic


def model_critic(
    architecture: str = "qwen2", *, policy: PreTrainedModel | None = None, plan: str = "auto", **overrides: object
) -> ModelCritic:
    """A copy of a policy with a head as if it had learned."""
    critic = ModelCritic(value_model(policy or policy_model(architecture, **overrides)), plan=plan)
    randomize(critic.module.score)
    return critic


def values_of(critic: Critic, policy: PreTrainedModel, batch: TokenBatch = BATCH, plan: str = "auto") -> torch.Tensor:
    """As a trainer's pass with gradients computes them."""
    scores = token_logprobs(policy, batch, want=critic.wants, plan=plan)
    return critic.values(batch, hidden=scores.wanted.get("hidden"))


def by_hand(body: nn.Module, weight: torch.Tensor, bias: float = 0.0, batch: TokenBatch = BATCH) -> torch.Tensor:
    """[N] one plain forward for each row: w . x + b at the token before each trainable token, else 0."""
    prompts = batch.prompt_ids.split(batch.prompt_lengths)
    values = []
    for row, response in enumerate(batch.response_ids.split(batch.response_lengths)):
        prompt = prompts[batch.prompt_index[row]]
        hidden = body(input_ids=torch.cat([prompt, response])[None], use_cache=False).last_hidden_state[0]
        before = hidden[len(prompt) - 1 : len(prompt) - 1 + len(response)]
        values.append(before.float() @ weight.float() + bias)
    return torch.cat(values) * batch.trainable


def gradients(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """[parameters] of a sum in which every value has its own weight."""
    module.zero_grad(set_to_none=True)
    (values * torch.linspace(-1, 2, len(values))).sum().backward()
    assert [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None] == []
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.requires_grad])


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= 2e-6 * expected.norm()


# Values.


@pytest.mark.parametrize(("architecture", "overrides"), ARCHITECTURES)
def test_a_critic_of_its_own_gives_what_its_head_says_before_each_token_in_every_plan(architecture, overrides, caplog):
    model = model_critic(architecture, **overrides).module.eval()
    expected = by_hand(model.base_model, model.score.weight[0])
    expected_gradient = gradients(model, expected)
    for plan in PLANS:
        critic = ModelCritic(model, plan=plan)
        values = critic.values(BATCH)
        assert values.dtype == torch.float32
        assert_same(values, expected)
        assert (gradients(model, values) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
        assert_same(critic.frozen_values(BATCH, max_tokens=None), expected)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("prefrl")] == []


@pytest.mark.parametrize(("architecture", "overrides"), ARCHITECTURES)
def test_a_head_reads_the_policy_before_each_token_in_every_plan(architecture, overrides):
    policy = policy_model(architecture, **overrides)
    critic = head_critic(policy)
    bias = critic.module.score.bias.item()
    expected = by_hand(policy.base_model, critic.module.score.weight[0], bias)
    both = nn.ModuleList([policy.base_model, critic.module])
    biased = by_hand(policy.base_model, critic.module.score.weight[0], critic.module.score.bias)
    expected_gradient = gradients(both, biased)
    for plan in PLANS:
        values = values_of(critic, policy, plan=plan)
        assert values.dtype == torch.float32
        assert_same(values, expected)
        assert (gradients(both, values) - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
        frozen = HeadCritic(policy, detach_trunk=False, plan=plan)
        frozen.module.load_state_dict(critic.module.state_dict())
        assert_same(frozen.frozen_values(BATCH, max_tokens=None), expected)


def test_a_value_does_not_depend_on_its_token_nor_on_later_ones():
    policy = policy_model()
    for critic in (model_critic(), head_critic(policy)):
        before = values_of(critic, policy).detach()
        changed = BATCH.response_ids.clone()
        changed[2] = (changed[2] + 1) % 100  # the third of four tokens of the first row
        after = values_of(critic, policy, BATCH.replace(response_ids=changed)).detach()
        assert_same(after[:3], before[:3])
        assert abs(after[3] - before[3]) > 1e-3
        assert_same(after[4:], before[4:])


def test_new_critics_give_zero_and_their_head_learns_at_once():
    for policy in (policy_model(), lora_policy()):
        for critic in (HeadCritic(policy, detach_trunk=False), ModelCritic(value_model(policy))):
            values = values_of(critic, policy)
            assert not values.any()
            (values - 1).square().sum().backward()
            (head,) = (p for name, p in critic.module.named_parameters() if name == "score.weight")
            assert head.grad.norm() > 1


def test_no_value_and_no_gradient_where_a_token_is_not_trainable():
    policy = policy_model()
    assert int((~BATCH.trainable).sum()) > 0
    for critic in (model_critic(), head_critic(policy)):
        values = values_of(critic, policy)
        assert torch.equal(values != 0, BATCH.trainable)
        assert torch.equal(critic.frozen_values(BATCH, max_tokens=9) != 0, BATCH.trainable)
        grad = gradients(critic.module, values * ~BATCH.trainable)
        assert not grad.any()


def test_an_idle_batch_gives_zero_gradients_to_every_parameter():
    policy = policy_model()
    idle = BATCH.select([1]).replace(trainable=torch.zeros(1, dtype=torch.bool))
    for critic in (model_critic(), head_critic(policy)):
        assert not gradients(critic.module, values_of(critic, policy, idle)).any()


@pytest.mark.parametrize("max_tokens", [1, 9, 12, 1000, None])
def test_order_and_pieces_change_nothing(max_tokens):
    policy, order = policy_model(), [3, 0, 4, 2, 1]
    starts = torch.tensor([0, *BATCH.response_lengths]).cumsum(0)
    shuffled = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in order])
    for critic in (model_critic(), head_critic(policy)):
        expected = values_of(critic, policy).detach()
        frozen = critic.frozen_values(BATCH, max_tokens=max_tokens)
        assert not frozen.requires_grad
        assert_same(frozen, expected)
        assert_same(critic.frozen_values(BATCH.select(order), max_tokens=max_tokens), expected[shuffled])


def test_pieces_hold_at_most_so_many_tokens_and_any_number_of_columns():
    sizes = []

    def score(piece: TokenBatch) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        sizes.append(piece.num_forward_tokens)
        return torch.stack([piece.response_ids, -piece.response_ids], 1)

    found = in_pieces(policy_model(), score, BATCH, max_tokens=13)
    assert torch.equal(found, torch.stack([BATCH.response_ids, -BATCH.response_ids], 1))
    assert len(sizes) > 1
    assert max(sizes) <= 13


def test_frozen_values_are_without_dropout_and_modes_stay():
    policy = policy_model(attention_dropout=0.5).train()
    model = model_critic(attention_dropout=0.5)
    for critic, module in ((model, model.module), (head_critic(policy), policy)):
        assert module.training
        first = critic.frozen_values(BATCH, max_tokens=None)
        assert torch.equal(critic.frozen_values(BATCH, max_tokens=None), first)
        assert all(each.training for each in module.modules())
        torch.manual_seed(0)
        assert not torch.allclose(values_of(critic, policy), first)


def test_a_head_makes_no_logits_for_frozen_values(monkeypatch):
    policy = policy_model()
    critic = head_critic(policy)
    critic.frozen_values(BATCH, max_tokens=None)  # the first use checks the plans
    made = []
    monkeypatch.setattr(scoring, "chunked_logprobs", lambda *args, **options: made.append(args))
    critic.frozen_values(BATCH, max_tokens=None)
    assert made == []


@pytest.mark.parametrize("kind", ["head", "model"])
def test_heads_compute_in_float32_under_autocast(kind):
    policy = policy_model()
    critic = head_critic(policy) if kind == "head" else model_critic()
    exact = values_of(critic, policy).detach()
    hidden = torch.randn(64, 32)
    expected = critic.module.score(hidden).squeeze(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = values_of(critic, policy).detach()
        assert torch.equal(critic_module._head_values(critic.module.score, hidden), expected)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())
    assert (values - exact).norm() <= 0.05 * exact.norm()


def test_a_policy_in_bfloat16_gives_float32_values():
    policy = tiny_model().to(torch.bfloat16)
    for critic in (HeadCritic(policy, detach_trunk=False), ModelCritic(value_model(policy))):
        randomize(critic.module.score)
        expected = values_of(critic, policy, plan="padded")
        assert expected.dtype == torch.float32
        frozen = critic.frozen_values(BATCH, max_tokens=None)
        assert (frozen - expected).norm() <= 0.05 * expected.norm()


# Which parameters learn.


@pytest.mark.parametrize("detach_trunk", [False, True])
def test_a_head_moves_its_trunk_unless_it_is_detached(detach_trunk):
    for policy in (policy_model(), lora_policy()):
        critic = head_critic(policy, detach_trunk=detach_trunk)
        values_of(critic, policy).sum().backward()
        trained = [(n, p) for n, p in policy.named_parameters() if p.requires_grad and "lm_head" not in n]
        moved = [n for n, p in trained if p.grad is not None and p.grad.any()]
        assert (len(moved) == 0) if detach_trunk else (len(moved) == len(trained))
        assert all(p.grad.any() for p in critic.parameters())
        assert [n for n, p in policy.named_parameters() if not p.requires_grad and p.grad is not None] == []


def test_a_head_leaves_the_gradient_of_the_log_probs_as_it_is():
    policy = policy_model()
    token_logprobs(policy, BATCH).logprobs.sum().backward()
    expected = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    critic = head_critic(policy, detach_trunk=True)
    scores = token_logprobs(policy, BATCH, want=critic.wants)
    (scores.logprobs.sum() + critic.values(BATCH, hidden=scores.wanted.get("hidden")).sum()).backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(policy.parameters(), expected, strict=True))


def test_a_critic_of_its_own_has_its_own_parameters_and_leaves_the_policy_alone():
    for policy in (policy_model(), lora_policy()):
        weights = copy.deepcopy(policy.state_dict())
        required = [p.requires_grad for p in policy.parameters()]
        critic = model_critic(policy=policy)
        assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in policy.parameters()}
        gradients(critic.module, critic.values(BATCH))
        assert all(p.grad.any() for p in critic.parameters())
        assert len(critic.parameters()) == len(list(critic.module.parameters()))
        assert all(p.grad is None for p in policy.parameters())
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.add_(1.0)
        assert all(torch.equal(weight, weights[name]) for name, weight in policy.state_dict().items())
        assert [p.requires_grad for p in policy.parameters()] == required
        assert not policy.training


def test_what_the_user_froze_in_a_given_model_is_not_trained():
    given = tiny_reward_model()
    given.model.embed_tokens.requires_grad_(False)
    critic = ModelCritic(value_model(policy_model(), given))
    critic.values(BATCH).sum().backward()
    assert [name for name, p in given.named_parameters() if p.grad is None] == ["model.embed_tokens.weight"]
    assert {id(p) for p in critic.parameters()} == {id(p) for p in given.parameters() if p.grad is not None}


@pytest.mark.usefixtures("single_process_group")
def test_through_ddp_the_trunk_gets_the_gradient_of_log_probs_and_values():
    policy = policy_model().train()
    critic = head_critic(policy)
    found = []
    for model in (policy, DistributedDataParallel(policy)):
        scores = token_logprobs(model, BATCH, want=critic.wants)
        loss = scores.logprobs + critic.values(BATCH, hidden=scores.wanted.get("hidden"))
        found.append(gradients(nn.ModuleList([policy, critic.module]), loss))
    assert_same(found[1], found[0])


def test_with_gradient_checkpointing_a_critic_of_its_own_has_the_same_gradients():
    critic = model_critic()
    expected = gradients(critic.module, critic.values(BATCH))
    checkpoint_activations(critic.module)
    assert_same(gradients(critic.module, critic.values(BATCH)), expected)


# What a critic of its own is made from.


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("build", [policy_model, lora_policy, lambda: policy_model("gpt2")])
def test_a_copy_has_the_body_that_the_policy_has_now(build, used):
    policy = build()
    if used:
        token_logprobs(policy, BATCH)  # the first use installs our attention, which the copy brings along
    critic = model_critic(policy=policy)
    expected = head_critic(policy)
    with torch.no_grad():
        expected.module.score.weight.copy_(critic.module.score.weight)
        expected.module.score.bias.zero_()
    difference = critic.frozen_values(BATCH, max_tokens=None) - expected.frozen_values(BATCH, max_tokens=None)
    assert difference.norm() <= 1e-5 * expected.frozen_values(BATCH, max_tokens=None).norm()
    assert all(module.training for module in critic.module.modules())
    assert not any(tensor.is_meta for tensor in [*critic.module.parameters(), *critic.module.buffers()])


def test_an_adapter_that_was_trained_is_in_the_copy():
    policy = lora_policy(trained=True)
    copied, base = value_model(policy), value_model(policy_model("llama"))
    assert not torch.allclose(copied.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)
    fresh = value_model(lora_policy(trained=False))
    assert torch.equal(fresh.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)


def test_making_a_critic_draws_no_random_numbers(tmp_path):
    policy_model().save_pretrained(tmp_path)
    policy, state = policy_model(), torch.get_rng_state()
    for given in (None, tmp_path):
        value_model(policy, given)
        assert torch.equal(torch.get_rng_state(), state)
    HeadCritic(policy, detach_trunk=True)
    assert torch.equal(torch.get_rng_state(), state)


def end_scores(model: PreTrainedModel) -> torch.Tensor:
    """[B] the reward of each row without its last token: the value at its last token."""
    return sequence_scores(model, BATCH).squeeze(1).detach()


def end_values(critic: ModelCritic) -> torch.Tensor:
    everything = BATCH.replace(trainable=torch.ones_like(BATCH.trainable))
    return critic.frozen_values(everything, max_tokens=None)[torch.tensor(BATCH.response_lengths).cumsum(0) - 1]


@pytest.mark.parametrize("how", ["instance", "path", "name"])
def test_a_reward_model_gives_the_first_values(how, tmp_path):
    reward_model = tiny_reward_model(seed=5)
    expected = end_scores(reward_model)
    reward_model.save_pretrained(tmp_path)
    given = {"instance": reward_model, "path": Path(tmp_path), "name": str(tmp_path)}[how]
    critic = ModelCritic(value_model(policy_model(), given))
    assert (critic.module is reward_model) == (how == "instance")
    assert_same(end_values(critic), expected)
    assert expected.abs().min() > 1e-2


def test_an_adapter_that_is_a_reward_model_is_merged(tmp_path):
    base = tiny_reward_model(seed=5)
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1, dtype=torch.float32)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, config).eval()
    randomize(adapted.base_model.model.score.modules_to_save)
    adapted.save_pretrained(tmp_path / "adapter")
    critic = ModelCritic(value_model(policy_model(), tmp_path / "adapter"))
    assert (end_values(critic) - end_scores(adapted)).norm() <= 1e-5 * end_scores(adapted).norm()
    assert len(critic.parameters()) == len(list(critic.module.parameters()))
    assert not any("lora" in name for name, _ in critic.module.named_parameters())


def test_a_language_model_by_name_keeps_its_body_and_gets_a_new_head(tmp_path):
    other = tiny_model(seed=7)
    other.save_pretrained(tmp_path)
    critic = ModelCritic(value_model(policy_model(), tmp_path))
    assert not critic.values(BATCH).any()
    body = critic.module.model.state_dict()
    assert all(torch.equal(weight, body[name]) for name, weight in other.model.state_dict().items())


def test_arguments_for_loading_reach_it(tmp_path):
    tiny_reward_model().save_pretrained(tmp_path)
    loaded = value_model(policy_model(), tmp_path, model_init_kwargs={"dtype": torch.bfloat16})
    assert loaded.dtype == torch.bfloat16
    loaded.save_pretrained(tmp_path / "half")
    assert value_model(policy_model(), tmp_path / "half").dtype == torch.float32
    for given in (None, tiny_reward_model()):
        with pytest.raises(ConfigError, match="of the critic has no effect, because no model is loaded"):
            value_model(policy_model(), given, model_init_kwargs={"dtype": torch.bfloat16})


def frozen_reward_model() -> PreTrainedModel:
    return tiny_reward_model().requires_grad_(False)


def sharing_reward_model(policy: PreTrainedModel) -> PreTrainedModel:
    model = tiny_reward_model()
    model.model.embed_tokens = policy.model.embed_tokens
    return model


def token_classifier(**overrides: object) -> PreTrainedModel:
    config = tiny_model(**overrides).config
    config.num_labels = 1
    return AutoModelForTokenClassification.from_config(config)  # type: ignore[no-any-return]


def encoder() -> PreTrainedModel:
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_labels": 1}
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **sizes))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(
            lambda policy: tiny_reward_model(vocab_size=64),
            "value_model has a vocabulary of 64 tokens, but the policy has 128.*with the same vocabulary",
            id="vocabulary",
        ),
        pytest.param(lambda policy: tiny_reward_model(num_labels=2), "value_model has num_labels=2", id="labels"),
        pytest.param(lambda policy: policy, "value_model is a Qwen2ForCausalLM: a critic is a sequence", id="policy"),
        pytest.param(lambda policy: policy.model, "value_model is a Qwen2Model", id="body"),
        pytest.param(lambda policy: nn.Linear(2, 1), "value_model is a Linear", id="module"),
        pytest.param(lambda policy: token_classifier(), "value_model is a Qwen2ForTokenClassification", id="tokens"),
        pytest.param(lambda policy: encoder(), "with classifier, dropout on its body", id="encoder"),
        pytest.param(sharing_reward_model, "value_model shares parameters with the policy", id="shared"),
        pytest.param(lambda policy: frozen_reward_model(), "no parameter of value_model requires", id="frozen"),
        pytest.param(lambda policy: lora_policy(), "value_model is a PeftModel.*merge_and_unload", id="peft"),
        pytest.param(
            lambda policy: "/no/such/folder", "the critic cannot be loaded from '/no/such/folder'", id="name"
        ),
    ],
)
def test_what_cannot_be_the_critic_is_refused(given, message):
    policy = policy_model()
    with pytest.raises(ConfigError, match=message):
        value_model(policy, given(policy))


def test_a_folder_that_cannot_be_the_critic_is_refused(tmp_path):
    token_classifier().save_pretrained(tmp_path / "tokens")
    with pytest.raises(
        ConfigError, match=r"score\.bias, which a sequence classifier does not have: it classifies tokens"
    ):
        value_model(policy_model(), tmp_path / "tokens")
    tiny_reward_model(num_labels=3).save_pretrained(tmp_path / "labels")
    with pytest.raises(ConfigError, match="A critic has num_labels=1"):
        value_model(policy_model(), tmp_path / "labels")
    encoder().bert.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ConfigError, match=r"has no weights for classifier\.bias"):
        value_model(policy_model(), tmp_path / "encoder")


def test_a_policy_that_has_no_copy_is_refused():
    with pytest.raises(ConfigError, match=r"no sequence classifier for a GraniteModel.*use a value head"):
        value_model(tiny_model("granite"))
    prompt = peft.get_peft_model(
        tiny_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ConfigError, match="virtual tokens in front of each row, which cannot be merged"):
        value_model(prompt)
    quantized = tiny_model()
    quantized.is_quantized = True
    with pytest.raises(ConfigError, match="the policy is quantized"):
        value_model(quantized)


def test_prompt_learning_shifts_no_value():
    torch.manual_seed(0)
    prompt = peft.get_peft_model(
        tiny_model("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    prompt.double()  # a row may have one value, whose rounding nothing averages
    critic = head_critic(prompt)
    for row in range(BATCH.num_rows):
        alone = critic.frozen_values(BATCH.select([row]), max_tokens=None)
        start = sum(BATCH.response_lengths[:row])
        whole = critic.frozen_values(BATCH, max_tokens=None)[start : start + len(alone)]
        assert_same(alone, whole)
        assert_same(values_of(critic, prompt)[start : start + len(alone)].detach(), whole)


def test_a_policy_whose_hidden_states_cannot_be_read_has_no_value_head():
    policy = tiny_model()
    original = type(policy).forward

    class Shifted(type(policy)):  # type: ignore[misc]
        def forward(self, *args, **kwargs):
            output = original(self, *args, **kwargs)
            output.logits = output.logits * torch.linspace(1, 2, output.logits.size(-1))
            return output

    policy.__class__ = Shifted
    with pytest.raises(ConfigError, match="values cannot be read from a Shifted: its log-probs differ"):
        HeadCritic(policy, detach_trunk=True).frozen_values(BATCH, max_tokens=None)


def test_a_head_without_hidden_states_is_an_error():
    with pytest.raises(ValueError, match="hidden=None: the value head reads"):
        head_critic(policy_model()).values(BATCH, hidden=None)


# Checkpoints.


def save(critic: Critic, folder: Path) -> None:
    critic.save(folder, critic.module.state_dict())


@pytest.mark.parametrize("build", [lambda policy: head_critic(policy), lambda policy: model_critic(policy=policy)])
def test_saved_and_loaded_values_are_bit_equal_and_parameters_stay_the_same_objects(build, tmp_path):
    policy = policy_model("gpt2")
    critic, other = build(policy), build(policy)
    randomize(critic.module, seed=8)
    expected = critic.frozen_values(BATCH, max_tokens=None)
    save(critic, tmp_path / "critic")
    parameters = other.parameters()
    state = torch.get_rng_state()
    assert not torch.equal(other.frozen_values(BATCH, max_tokens=None), expected)
    other.load(tmp_path / "critic")
    assert torch.equal(other.frozen_values(BATCH, max_tokens=None), expected)
    assert all(p is q for p, q in zip(other.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_saved_critic_is_a_model_that_anyone_can_load(tmp_path):
    policy = policy_model()
    critic = model_critic(policy=policy)
    expected = critic.frozen_values(BATCH, max_tokens=None)  # our attention is installed now
    save(critic, tmp_path)
    again = ModelCritic(value_model(policy, tmp_path))
    saved = critic.module.state_dict()
    assert all(torch.equal(weight, saved[name]) for name, weight in again.module.state_dict().items())
    assert_same(again.frozen_values(BATCH, max_tokens=None), expected)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_same(by_hand(plain.model, plain.score.weight[0]).detach(), expected)


def test_a_saved_critic_of_another_model_is_refused(tmp_path):
    save(model_critic("llama"), tmp_path / "llama")
    save(head_critic(policy_model()), tmp_path / "head")
    critic, head = model_critic(), head_critic(policy_model())
    with pytest.raises(ConfigError, match=r"value_head\.safetensors: resume with the same kind of critic"):
        head.load(tmp_path / "llama")
    with pytest.raises(ConfigError, match="the critic cannot be loaded from"):
        critic.load(tmp_path / "head")
    save(model_critic(intermediate_size=32), tmp_path / "small")
    with pytest.raises(ConfigError, match="does not fit this one"):
        critic.load(tmp_path / "small")
    AutoModelForCausalLM.from_config(tiny_model().config).save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"has no weights for score\.weight"):
        critic.load(tmp_path / "policy")
    wide = policy_model(hidden_size=64)
    save(HeadCritic(wide, detach_trunk=True), tmp_path / "wide")
    with pytest.raises(ConfigError, match="does not fit this one"):
        head.load(tmp_path / "wide")


# Learning.


@pytest.mark.parametrize("kind", ["detached head", "head", "model"])
def test_a_critic_learns_to_foresee_a_return_that_the_prompt_decides(kind):
    policy = policy_model()
    critic: Critic
    critic = ModelCritic(value_model(policy)) if kind == "model" else HeadCritic(policy, detach_trunk="det" in kind)
    returns = torch.tensor([3.0, -1.0, 3.0, 0.5, -1.0])[BATCH.row_index] * BATCH.trainable
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.02 if kind != "model" else 0.003)
    for _ in range(60):
        loss = (values_of(critic, policy) - returns).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (critic.frozen_values(BATCH, max_tokens=None) - returns).square().sum() < 0.2 * returns.square().sum()


def test_a_head_begins_at_zero_with_a_bias():
    head = ValueHead(8)
    assert {name: p.shape for name, p in head.named_parameters()} == {"score.weight": (1, 8), "score.bias": (1,)}
    assert not head(torch.randn(3, 8)).any()


def test_positions_are_those_that_the_log_probs_are_read_from():
    # One row of one prompt token and one response token: its value is that of the prompt alone.
    batch = BATCH.select([3])
    assert lay_out(batch.select([0]), "packed").predictors[0].item() == batch.prompt_lengths[0] - 1
    critic = model_critic()
    first = by_hand(critic.module.eval().base_model, critic.module.score.weight[0], batch=batch)
    assert_same(critic.values(batch), first)
