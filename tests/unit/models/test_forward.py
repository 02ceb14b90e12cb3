"""token_logprobs: every plan gives the numbers and gradients of one plain forward for each row."""

from __future__ import annotations

import copy
import inspect
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefrl.errors import ConfigError
from prefrl.models import forward, plans, scoring, selfcheck
from prefrl.models.attention import interface as attention
from prefrl.models.forward import token_logprobs
from prefrl.models.modes import checkpoint_activations
from prefrl.models.scoring import prepare_for_scoring
from prefrl.types import TokenBatch
from tests.assets import tiny_model
from tests.unit.models.test_attention import with_siblings_in_sight

VOCAB_SIZE = 128
PLANS = ["shared_prefix", "packed", "padded"]
MODELS = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("llama", {"attn_implementation": "eager"}, id="llama-eager"),
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("qwen2", {"tie_word_embeddings": True}, id="qwen2-tied"),
    pytest.param("qwen3", {}, id="qwen3"),
    pytest.param("mistral", {"sliding_window": None}, id="mistral"),
    pytest.param("mistral", {"sliding_window": 8}, id="mistral-window-8"),
    pytest.param("mistral", {"sliding_window": 400}, id="mistral-window-400"),
    pytest.param("gpt2", {}, id="gpt2"),
    pytest.param("cohere", {"logit_scale": 0.25}, id="cohere-logit-scale"),
    pytest.param("granite", {"logits_scaling": 3.0}, id="granite-logits-scaling"),
    pytest.param("gemma3_text", {"sliding_window": 8, "final_logit_softcapping": 5.0}, id="gemma3-window-softcap"),
]


def ragged_batch(trainable_share=0.7):
    """3 prompts, 6 interleaved rows, one response of one token, and holes in what is trainable."""
    generator = torch.Generator().manual_seed(1)
    prompt_lengths, prompt_index, response_lengths = (5, 9, 3), (0, 1, 0, 2, 1, 0), (4, 1, 7, 3, 6, 12)
    num_tokens = sum(response_lengths)
    return TokenBatch(
        prompt_ids=torch.randint(2, VOCAB_SIZE, (sum(prompt_lengths),), generator=generator),
        prompt_lengths=prompt_lengths,
        prompt_index=prompt_index,
        response_ids=torch.randint(2, VOCAB_SIZE, (num_tokens,), generator=generator),
        response_lengths=response_lengths,
        trainable=torch.rand(num_tokens, generator=generator) < trainable_share,
        group_index=prompt_index,
    )


def square_logits(model):
    """A head that we cannot reproduce."""
    plain = type(model).forward

    def squared_logits(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.square()
        return output

    model.forward = squared_logits.__get__(model)


def plain_logits(model, batch):
    """[N, V] from one plain forward for each row, in order."""
    prompts = batch.prompt_ids.split(batch.prompt_lengths)
    rows = []
    for prompt, response in zip(batch.prompt_index, batch.response_ids.split(batch.response_lengths), strict=True):
        rows.append(model(input_ids=torch.cat([prompts[prompt], response])[None]).logits[0, -len(response) - 1 : -1])
    return torch.cat(rows)


def plain_log_softmax(model, batch, temperature=1.0):
    return (plain_logits(model, batch) / temperature).log_softmax(-1)


def plain_logprobs(model, batch, temperature=1.0):
    log_softmax = plain_log_softmax(model, batch, temperature)
    return log_softmax.gather(1, batch.response_ids[:, None]).squeeze(1) * batch.trainable


def gradient(model, logprobs):
    """[parameters] of a sum in which every token has its own weight."""
    model.zero_grad(set_to_none=True)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def assert_same_gradient(actual, expected):
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def assert_same_logprobs(actual, expected, atol=2e-6):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("architecture", "overrides"), MODELS)
def test_plans_equal_one_plain_forward_for_each_row(architecture, overrides, caplog):
    model, batch = tiny_model(architecture, **overrides), ragged_batch()
    expected = plain_logprobs(model, batch)
    expected_gradient = gradient(model, expected)
    for plan in PLANS:
        logprobs = token_logprobs(model, batch, plan=plan).logprobs
        assert_same_logprobs(logprobs, expected)
        assert_same_gradient(gradient(model, logprobs), expected_gradient)
    assert caplog.records == []


@pytest.mark.parametrize("temperature", [0.5, 1.7])
@pytest.mark.parametrize("plan", PLANS)
def test_entropy_correct_and_temperature_describe_the_same_distribution(plan, temperature):
    model, batch = tiny_model("qwen2"), ragged_batch()
    log_softmax = plain_log_softmax(model, batch, temperature)
    scores = token_logprobs(model, batch, plan=plan, temperature=temperature, want=("entropy", "correct"))
    assert_same_logprobs(scores.logprobs, plain_logprobs(model, batch, temperature), atol=5e-6)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1) * batch.trainable
    torch.testing.assert_close(scores.entropy, entropy, rtol=0, atol=5e-6)
    assert torch.equal(scores.correct, (log_softmax.argmax(-1) == batch.response_ids) & batch.trainable)


def assert_constants_of_the_plain_forward(model, batch, plan="auto"):
    scores = token_logprobs(model, batch, plan=plan, temperature=1.7, want=("mean_logit", "log_collision"))
    mean = plain_logits(model, batch).mean(-1) * batch.trainable
    torch.testing.assert_close(scores.mean_logit, mean.detach(), rtol=1e-5, atol=5e-6)
    collision = plain_log_softmax(model, batch, 1.7).exp().square().sum(-1).log() * batch.trainable
    torch.testing.assert_close(scores.log_collision, collision.detach(), rtol=1e-5, atol=5e-6)
    assert scores.mean_logit.dtype == scores.log_collision.dtype == torch.float32
    assert not scores.mean_logit.requires_grad
    assert not scores.log_collision.requires_grad
    # Whatever is computed beside them, log-probs keep their gradient.
    expected = gradient(model, token_logprobs(model, batch, plan=plan, temperature=1.7).logprobs)
    assert_same_gradient(gradient(model, scores.logprobs), expected)


@pytest.mark.parametrize(("architecture", "overrides"), MODELS)
def test_mean_logit_and_log_collision_are_constants_of_the_plain_forward(architecture, overrides):
    assert_constants_of_the_plain_forward(tiny_model(architecture, **overrides), ragged_batch())


@pytest.mark.parametrize("plan", PLANS)
def test_mean_logit_and_log_collision_are_equal_in_every_plan(plan):
    assert_constants_of_the_plain_forward(tiny_model("qwen2"), ragged_batch(), plan)


def test_what_is_not_wanted_is_not_computed():
    scores = token_logprobs(tiny_model("llama"), ragged_batch())
    assert scores.wanted == {}


def test_an_unknown_name_of_a_quantity_is_an_error():
    with pytest.raises(ValueError, match=r"want=\['rank'\]: allowed are entropy, entropy_gradient, correct"):
        token_logprobs(tiny_model("llama"), ragged_batch(), want=("rank",))


@pytest.mark.parametrize("plan", PLANS)
def test_tokens_that_are_not_trainable_get_zero_and_no_gradient(plan):
    model, batch = tiny_model("llama"), ragged_batch()
    assert 0 < batch.trainable.sum() < batch.num_tokens
    logprobs = token_logprobs(model, batch, plan=plan).logprobs
    assert torch.equal(logprobs == 0, ~batch.trainable)
    weights = torch.where(batch.trainable, torch.linspace(-1, 1, batch.num_tokens), torch.tensor(1e6))
    model.zero_grad()
    (logprobs * weights).sum().backward()
    assert max(p.grad.abs().max() for p in model.parameters()) < 1e3


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("plan", PLANS)
def test_a_batch_without_trainable_tokens_gives_zero_gradients_to_every_parameter(plan, overrides):
    model, batch = tiny_model("qwen2", **overrides), ragged_batch(trainable_share=0.0)
    logprobs = token_logprobs(model, batch, plan=plan).logprobs
    assert torch.equal(logprobs, torch.zeros(batch.num_tokens))
    assert torch.count_nonzero(gradient(model, logprobs)) == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_gradient_checkpointing_gives_equal_gradients(plan, use_reentrant):
    model, batch = tiny_model("qwen2").train(), ragged_batch()
    expected = gradient(model, token_logprobs(model, batch, plan=plan).logprobs)
    checkpoint_activations(model, {"use_reentrant": use_reentrant})
    first = token_logprobs(model, batch, plan=plan).logprobs
    token_logprobs(model, batch.select([3, 0, 5]), plan=plan)  # another batch between a forward and its backward
    assert_same_gradient(gradient(model, first), expected)


def test_auto_shares_prompts_where_rows_share_them(monkeypatch):
    model, batch = tiny_model("llama"), ragged_batch()
    used = record_plans(monkeypatch)
    token_logprobs(model, batch)
    token_logprobs(model, batch.select([3, 1]))
    assert used == ["shared_prefix", "packed"]


@pytest.mark.parametrize("dropout", [{"attention_dropout": 0.1}, {"module": nn.Dropout(0.1)}])
def test_auto_shares_no_prompts_while_dropout_is_active(dropout, monkeypatch):
    module = dropout.pop("module", None)
    model, batch = tiny_model("llama", **dropout), ragged_batch()
    if module is not None:
        model.model.layers[0].extra = module
    used = record_plans(monkeypatch)
    token_logprobs(model.train(), batch)
    token_logprobs(model.eval(), batch)
    assert used == ["packed", "shared_prefix"]


def record_plans(monkeypatch):
    used = []

    def lay_out(batch, plan, rules=None):
        used.append(plan)
        return plans.lay_out(batch, plan, rules)

    monkeypatch.setattr(forward, "lay_out", lay_out)
    return used


def test_a_shared_prompt_is_fed_once_and_last_tokens_never():
    batch = ragged_batch()
    fed = {plan: plans.lay_out(batch, plan).input_ids.numel() for plan in PLANS}
    responses = sum(batch.response_lengths) - batch.num_rows
    assert fed["shared_prefix"] == 5 + 9 + 3 + responses
    assert fed["packed"] == 3 * 5 + 2 * 9 + 3 + responses
    assert fed["padded"] == batch.num_rows * (5 + 12 - 1)


def test_no_mask_of_the_whole_row_is_built(monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("transformers built a mask")

    model, batch = tiny_model("llama"), ragged_batch()
    token_logprobs(model, batch)
    monkeypatch.setitem(attention.AttentionMaskInterface._global_mapping, "prefrl_sdpa", forbidden)
    token_logprobs(model, batch, plan="shared_prefix")
    token_logprobs(model, batch, plan="packed")
    with pytest.raises(AssertionError, match="built a mask"):
        token_logprobs(model, batch, plan="padded")


def lora(model, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, **options))
    return peft_model.eval()


@pytest.mark.parametrize("prepare_first", [True, False])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"], "all-linear"])
def test_lora_models_give_equal_numbers_and_gradients(targets, prepare_first):
    model, batch = tiny_model("qwen2"), ragged_batch()
    if prepare_first:
        token_logprobs(model, batch)
    model = lora(model, target_modules=targets)
    expected = plain_logprobs(model, batch)
    expected_gradient = gradient(model, expected)
    for plan in PLANS:
        logprobs = token_logprobs(model, batch, plan=plan).logprobs
        assert_same_logprobs(logprobs, expected)
        assert_same_gradient(gradient(model, logprobs), expected_gradient)
    assert_constants_of_the_plain_forward(model, batch)


def test_a_lora_model_with_its_adapter_off_is_its_base_model():
    base, batch = tiny_model("qwen2"), ragged_batch()
    expected = token_logprobs(base, batch).logprobs
    model = lora(copy.deepcopy(base), target_modules=["q_proj", "lm_head"])
    assert (token_logprobs(model, batch).logprobs - expected).abs().max() > 0.1
    with model.disable_adapter():
        assert_same_logprobs(token_logprobs(model, batch).logprobs, expected)


def test_lora_with_reentrant_checkpointing_gives_equal_gradients():
    model, batch = lora(tiny_model("qwen2"), target_modules=["q_proj", "down_proj"]).train(), ragged_batch()
    expected = gradient(model, token_logprobs(model, batch).logprobs)
    model.enable_input_require_grads()
    checkpoint_activations(model.base_model.model, {"use_reentrant": True})
    assert_same_gradient(gradient(model, token_logprobs(model, batch).logprobs), expected)


def test_prompt_learning_falls_back_to_padded_rows(caplog):
    from peft import PromptTuningConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    batch = ragged_batch()
    logprobs = token_logprobs(model, batch).logprobs
    assert_same_logprobs(logprobs, plain_logprobs(model, batch))
    assert "virtual tokens" in caplog.text
    gradient(model, logprobs)


def test_gemma2_falls_back_and_says_so_once(caplog):
    model = tiny_model("gemma2", sliding_window=8, final_logit_softcapping=4.0, attn_logit_softcapping=2.0)
    batch = ragged_batch()
    implementation = model.config._attn_implementation
    expected = plain_logprobs(model, batch)
    expected_gradient = gradient(model, expected)
    for _ in range(2):
        logprobs = token_logprobs(model, batch).logprobs
        assert_same_logprobs(logprobs, expected)
        assert_same_gradient(gradient(model, logprobs), expected_gradient)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "Gemma2ForCausalLM" in record.getMessage()
    assert "shared_prefix and packed to padded" in record.getMessage()
    assert "attn_logit_softcapping" in record.getMessage()
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("plan", ["shared_prefix", "packed"])
def test_a_plan_asked_for_by_name_that_does_not_work_is_an_error(plan):
    message = f'plan="{plan}" does not work for Gemma2ForCausalLM: it soft-caps.*Use plan="auto" or "padded"'
    with pytest.raises(ConfigError, match=message):
        token_logprobs(tiny_model("gemma2"), ragged_batch(), plan=plan)


def test_an_unknown_plan_is_an_error():
    with pytest.raises(ConfigError, match=r'plan="flat".*shared_prefix'):
        token_logprobs(tiny_model("llama"), ragged_batch(), plan="flat")


def test_a_head_that_we_cannot_reproduce_is_used_through_its_own_logits(caplog):
    model, batch = tiny_model("llama"), ragged_batch()
    square_logits(model)
    expected = plain_logprobs(model, batch)
    logprobs = token_logprobs(model, batch).logprobs
    assert_same_logprobs(logprobs, expected, atol=2e-5)  # of squares up to 100
    assert_same_gradient(gradient(model, logprobs), gradient(model, plain_logprobs(model, batch)))
    assert "to padded: its log-probs differ" in caplog.text
    assert_constants_of_the_plain_forward(model, batch)


@pytest.mark.parametrize("architecture", ["bloom", "mamba"])
def test_models_without_the_attention_interface_fall_back(architecture, caplog):
    model, batch = tiny_model(architecture), ragged_batch()
    assert_same_logprobs(token_logprobs(model, batch).logprobs, plain_logprobs(model, batch))
    assert "padded" in caplog.text


class TestSelfCheckCatches:
    """Each mistake is made inside our own code or the model; the check must see it and fall back."""

    def reasons(self, model):
        return dict(selfcheck_verdict(model).reasons)

    def test_attention_that_ignores_the_layout(self, monkeypatch):
        def ignorant(query, key, value, layout, **kwargs):
            whole = attention.Layout(((query.size(2), -1),))
            return plain_flat(query, key, value, whole, **kwargs)

        plain_flat = attention.flat_attention
        monkeypatch.setattr(attention, "flat_attention", ignorant)
        assert set(self.reasons(tiny_model("llama"))) == {"shared_prefix", "packed"}

    def test_a_branch_that_sees_its_sibling(self, monkeypatch):
        def fused(query, key, value, layout, **kwargs):
            trees = with_siblings_in_sight(layout.forest)
            return plain_flat(query, key, value, attention.Layout(trees), **kwargs)

        plain_flat = attention.flat_attention
        monkeypatch.setattr(attention, "flat_attention", fused)
        assert set(self.reasons(tiny_model("llama"))) == {"shared_prefix"}

    def test_a_branch_of_a_branch_that_sees_itself_alone(self, monkeypatch):
        def cut(query, key, value, layout, **kwargs):
            parents = [parent for _, parent in layout.forest]
            is_deep = [parent >= 0 and parents[parent] >= 0 for parent in parents]
            trees = tuple((n, -1 if deep else p) for (n, p), deep in zip(layout.forest, is_deep, strict=True))
            return plain_flat(query, key, value, attention.Layout(trees), **kwargs)

        plain_flat = attention.flat_attention
        monkeypatch.setattr(attention, "flat_attention", cut)
        assert set(self.reasons(tiny_model("llama"))) == {"shared_prefix"}

    @pytest.mark.parametrize("window", [8, 100])
    def test_a_window_that_is_ignored(self, window, monkeypatch):
        plain_flat = attention.flat_attention
        monkeypatch.setattr(
            attention, "flat_attention", lambda *args, **kwargs: plain_flat(*args, **{**kwargs, "window": None})
        )
        model = tiny_model("mistral", sliding_window=window)
        assert set(self.reasons(model)) == {"shared_prefix", "packed"}

    def test_a_long_window_that_attention_is_not_told_of(self, monkeypatch):
        ours = attention._sdpa_or_flat

        def untold(*args, sliding_window=None, **kwargs):
            return ours(*args, **kwargs)

        monkeypatch.setitem(attention.AttentionInterface._global_mapping, "prefrl_sdpa", untold)
        reasons = self.reasons(tiny_model("mistral", sliding_window=400))
        assert "sliding_window=400" in reasons["shared_prefix"]

    def test_positions_off_by_one(self, monkeypatch):
        def shifted(batch, plan, rules=None):
            inputs = plans.lay_out(batch, plan, rules)
            if plan == "shared_prefix":
                starts = (inputs.position_ids.diff(prepend=inputs.position_ids[:, :1]) < 0).cumsum(1) > 0
                inputs.position_ids.add_(starts.long())
            return inputs

        monkeypatch.setattr(selfcheck, "lay_out", shifted)
        assert set(self.reasons(tiny_model("llama"))) == {"shared_prefix"}

    def test_a_logit_scale_that_the_config_does_not_tell(self, monkeypatch):
        monkeypatch.setattr(scoring, "logit_transform", lambda model: (1.0, None))
        verdict = selfcheck_verdict(tiny_model("granite", logits_scaling=3.0))
        assert verdict.own_logits
        assert set(verdict.reasons) == {"shared_prefix", "packed"}

    def test_model_that_raises(self, monkeypatch):
        def broken(*args, **kwargs):
            raise RuntimeError("no such kernel")

        monkeypatch.setattr(attention, "flat_attention", broken)
        model = tiny_model("llama")
        assert "RuntimeError: no such kernel" in self.reasons(model)["packed"]
        assert model.config._attn_implementation == "sdpa"


def selfcheck_verdict(model):
    prepare_for_scoring(model)
    return selfcheck.check_plans(model)


def test_the_check_leaves_modes_random_state_and_gradients_alone():
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    selfcheck_verdict(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_the_check_runs_once_and_again_when_the_attention_is_exchanged(monkeypatch):
    model, batch = tiny_model("llama"), ragged_batch()
    runs = []

    def counted(checked, image_example):
        runs.append(checked)
        return selfcheck.check_plans(checked, image_example)

    monkeypatch.setattr(forward, "check_plans", counted)
    expected = token_logprobs(model, batch).logprobs
    token_logprobs(model, batch, plan="packed")
    assert len(runs) == 1
    model.set_attn_implementation("eager")
    assert_same_logprobs(token_logprobs(model, batch).logprobs, expected)
    assert len(runs) == 2


def test_an_implementation_without_a_flat_form_falls_back(caplog):
    model, batch = tiny_model("llama"), ragged_batch()
    attention.AttentionInterface.register("someone_elses", attention.ALL_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("someone_elses")
    token_logprobs(model, batch)
    assert 'attn_implementation="someone_elses" has no flat form' in caplog.text
    assert model.config._attn_implementation == "someone_elses"


@pytest.mark.parametrize(
    ("architecture", "overrides"), [("llama", {}), ("gpt2", {}), ("mistral", {}), ("mistral", {"sliding_window": 6})]
)
def test_generation_is_as_before(architecture, overrides):
    model, batch = tiny_model(architecture, **overrides), ragged_batch()
    ids = torch.randint(2, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[2, :2] = 0

    def generate():
        options = {"do_sample": False, "max_new_tokens": 12, "output_logits": True, "return_dict_in_generate": True}
        output = model.generate(ids, attention_mask=mask, **options)
        return output.sequences, torch.stack(output.logits)

    before, logits = generate()
    prepare_for_scoring(model)
    token_logprobs(model, batch).logprobs.sum().backward()
    after, logits_after = generate()
    assert torch.equal(before, after)
    assert torch.equal(logits, logits_after)
    expected = plain_logprobs(model, batch)
    assert_same_logprobs(token_logprobs(model, batch).logprobs, expected)


def test_without_a_request_the_forward_is_the_models_own():
    model, ids = tiny_model("llama"), torch.arange(2, 12)[None]
    signature, expected = inspect.signature(model.forward), model(input_ids=ids, labels=ids)
    prepare_for_scoring(model)
    assert inspect.signature(model.forward) == signature
    actual = model(ids, labels=ids)
    assert torch.equal(actual.logits, expected.logits)
    assert torch.equal(actual.loss, expected.loss)


def test_preparing_twice_wraps_once():
    model = tiny_model("llama")
    state = prepare_for_scoring(model)
    wrapped = model.forward
    assert prepare_for_scoring(model) is state
    assert model.forward == wrapped


def test_a_deep_copy_scores_with_its_own_weights():
    model, batch = tiny_model("llama"), ragged_batch()
    expected = token_logprobs(model, batch).logprobs
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert_same_logprobs(token_logprobs(twin, batch).logprobs, expected)
    assert_same_logprobs(plain_logprobs(twin, batch), expected)
    assert (token_logprobs(model, batch).logprobs - expected).abs().max() > 0.1
    assert_same_logprobs(token_logprobs(model, batch).logprobs, plain_logprobs(model, batch))


def test_save_and_reload_give_the_same_model(tmp_path):
    model, batch = tiny_model("qwen2"), ragged_batch()
    expected = token_logprobs(model, batch).logprobs
    model.save_pretrained(tmp_path)
    assert "prefrl" not in (tmp_path / "config.json").read_text()
    reloaded = type(model).from_pretrained(tmp_path)
    assert reloaded.config._attn_implementation == "sdpa"
    assert_same_logprobs(token_logprobs(reloaded, batch).logprobs, expected)


@pytest.fixture
def single_process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.usefixtures("single_process_group")
def test_ddp_gives_the_same_gradients(with_lora):
    model, batch = tiny_model("qwen2").train(), ragged_batch()
    if with_lora:
        model = lora(model, target_modules=["q_proj", "lm_head"])
    expected = gradient(model, token_logprobs(model, batch).logprobs)
    wrapped = DistributedDataParallel(model)
    calls = []
    wrapped.register_forward_hook(lambda *_: calls.append("through DDP"))
    assert_same_gradient(gradient(model, token_logprobs(wrapped, batch).logprobs), expected)
    nothing = batch.replace(trainable=torch.zeros_like(batch.trainable))
    assert torch.count_nonzero(gradient(model, token_logprobs(wrapped, nothing).logprobs)) == 0
    assert len(calls) == 2


@pytest.mark.parametrize("plan", PLANS)
def test_mixed_precision_of_accelerate_reaches_model_and_head(plan):
    from accelerate.utils import convert_outputs_to_fp32

    model, batch = tiny_model("qwen2").train(), ragged_batch()
    expected = token_logprobs(model, batch).logprobs
    expected_gradient = gradient(model, expected)
    state = prepare_for_scoring(model)
    state.verdict = None
    # What Accelerator.prepare_model does for mixed_precision="bf16".
    model._original_forward = model.forward
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    model.forward = convert_outputs_to_fp32(autocast(model.forward.__func__)).__get__(model)
    dtypes = []
    model.model.layers[1].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    scores = token_logprobs(model, batch, plan=plan, want=("entropy", "correct"))
    assert scores.logprobs.dtype == torch.float32
    difference = (scores.logprobs - expected).abs()
    assert 1e-4 < difference.max() < 0.5
    relative = (gradient(model, scores.logprobs) - expected_gradient).norm() / expected_gradient.norm()
    assert 1e-4 < relative < 0.1


def test_preparing_after_accelerate_is_an_error():
    model = tiny_model("llama")
    model._original_forward = model.forward
    with pytest.raises(ConfigError, match=r"before accelerator\.prepare"):
        prepare_for_scoring(model)


@pytest.mark.parametrize("build", [lambda: tiny_model("llama").model, lambda: nn.Linear(2, 2)])
def test_a_model_without_a_language_model_head_is_an_error(build):
    with pytest.raises(ConfigError, match="AutoModelForCausalLM"):
        token_logprobs(build(), ragged_batch())


@pytest.mark.parametrize("plan", PLANS)
def test_an_empty_batch_is_an_error(plan):
    with pytest.raises(ValueError, match="0 rows"):
        token_logprobs(tiny_model("llama"), ragged_batch().select([]), plan=plan)


@pytest.mark.parametrize("plan", PLANS)
def test_one_token_after_one_token_is_enough(plan):
    one = ragged_batch().select([1]).replace(prompt_ids=torch.tensor([5]), prompt_lengths=(1,))
    one = one.replace(trainable=torch.tensor([True]))
    model = tiny_model("llama")
    assert_same_logprobs(token_logprobs(model, one, plan=plan).logprobs, plain_logprobs(model, one))


def test_row_order_changes_nothing():
    model, batch = tiny_model("qwen2"), ragged_batch()
    order = [5, 0, 3, 1, 2, 4]
    expected = token_logprobs(model, batch).logprobs.split(batch.response_lengths)
    actual = token_logprobs(model, batch.select(order)).logprobs
    assert_same_logprobs(actual, torch.cat([expected[row] for row in order]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 8])
def test_plans_agree_on_cuda(window, dtype, caplog):
    model = tiny_model("mistral", sliding_window=window, head_dim=16).to("cuda", dtype)
    batch = ragged_batch().to("cuda")
    padded = token_logprobs(model, batch, plan="padded").logprobs
    for plan in ["shared_prefix", "packed"]:
        logprobs = token_logprobs(model, batch, plan=plan).logprobs
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        assert_same_logprobs(logprobs, padded, atol=tolerance)
        logprobs.sum().backward()
    assert caplog.records == []
