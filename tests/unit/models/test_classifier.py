"""sequence_scores: every plan gives the scores and gradients of the model's own forward for each row."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from prefrl.data.collate import flat_batch
from prefrl.errors import ConfigError
from prefrl.models import forward, plans, selfcheck
from prefrl.models.attention import interface as attention
from prefrl.models.classifier import sequence_scores
from prefrl.models.forward import token_logprobs
from prefrl.models.modes import checkpoint_activations
from prefrl.models.scoring import prepare_for_scoring
from tests.assets import tiny_model
from tests.unit.models.test_attention import with_siblings_in_sight

VOCAB_SIZE = 128
PAD = 0
PLANS = ["shared_prefix", "packed", "padded"]
MODELS = [
    pytest.param("qwen2", {}, id="qwen2"),
    pytest.param("qwen2", {"pad_token_id": None}, id="qwen2-no-padding-token"),
    pytest.param("llama", {"attn_implementation": "eager"}, id="llama-eager"),
    pytest.param("qwen3", {}, id="qwen3"),
    pytest.param("gpt2", {}, id="gpt2"),
    pytest.param("mistral", {"sliding_window": 4}, id="mistral-window-4"),
    pytest.param("mistral", {"sliding_window": 400}, id="mistral-window-400"),
]
DECODER = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}


def tiny_classifier(architecture="qwen2", num_labels=1, seed=0, **overrides):
    """A random sequence classifier of two layers and hidden size 32, in float32, in eval mode."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    sizes |= (
        SIZES.get(architecture, DECODER)
        | {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": 1}
        | {"num_labels": num_labels}
        | overrides
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(
            AutoConfig.for_model(architecture, **sizes), dtype=torch.float32
        )
        for parameter in model.parameters():  # larger than usual, so that outputs differ clearly between tokens
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.2)
    return model.eval()


def ragged_pairs(marker=5):
    """3 prompts, 6 interleaved rows; two responses are the marker alone, so that one side of a pair is its prompt."""
    generator = torch.Generator().manual_seed(1)

    def ids(length):
        return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()

    prompts = [ids(5), ids(9), ids(3)]
    groups, lengths = (0, 1, 0, 2, 1, 2), (4, 0, 7, 3, 6, 0)
    responses = [[*ids(length), marker] for length in lengths]
    trainable = [[False] * length + [True] for length in lengths]
    return flat_batch([prompts[group] for group in groups], responses, trainable=trainable, groups=groups)


def plain_scores(model, batch):
    """[B, L] from one plain forward for each row, without its marker."""
    prompts = batch.prompt_ids.split(batch.prompt_lengths)
    responses = batch.response_ids.split(batch.response_lengths)
    rows = [torch.cat([prompts[i], response[:-1]]) for i, response in zip(batch.prompt_index, responses, strict=True)]
    return torch.cat([model(input_ids=row[None]).logits for row in rows])


def gradient(model, scores):
    """[parameters] of a sum in which every score has its own weight."""
    model.zero_grad(set_to_none=True)
    (scores * torch.linspace(-1, 2, scores.numel()).view_as(scores)).sum().backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name.startswith("prefrl")]


def assert_every_plan_is_the_plain_forward(model, batch):
    expected = plain_scores(model, batch)
    expected_gradient = gradient(model, expected)
    for plan in PLANS:
        scores = sequence_scores(model, batch, plan=plan)
        assert_same(scores, expected)
        assert_same(gradient(model, scores), expected_gradient)


@pytest.mark.parametrize(("architecture", "overrides"), MODELS)
def test_plans_equal_one_plain_forward_for_each_row(architecture, overrides, caplog):
    assert_every_plan_is_the_plain_forward(tiny_classifier(architecture, **overrides), ragged_pairs())
    assert warnings_of(caplog) == []


def test_a_score_is_the_heads_product_with_the_last_tokens_hidden_state():
    model = tiny_classifier()
    batch = flat_batch([[5, 6]], [[7, 8, 9]], trainable=[[False, False, True]])
    hidden = model.model(torch.tensor([[5, 6, 7, 8]])).last_hidden_state[0, -1]
    torch.testing.assert_close(sequence_scores(model, batch), (hidden @ model.score.weight[0])[None, None])


def test_several_labels_give_a_column_each(caplog):
    model, batch = tiny_classifier(num_labels=3), ragged_pairs()
    assert sequence_scores(model, batch).shape == (6, 3)
    assert_every_plan_is_the_plain_forward(model, batch)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("plan", PLANS)
def test_the_marker_and_its_flag_change_nothing(plan):
    model = tiny_classifier()
    expected = sequence_scores(model, ragged_pairs(marker=5), plan=plan)
    for marker in (PAD, VOCAB_SIZE - 1):
        assert torch.equal(sequence_scores(model, ragged_pairs(marker=marker), plan=plan), expected)
    idle = ragged_pairs().replace(trainable=torch.zeros(26, dtype=torch.bool))
    assert torch.equal(sequence_scores(model, idle, plan=plan), expected)


@pytest.mark.parametrize("plan", PLANS)
def test_padding_tokens_at_the_end_of_a_row_are_tokens_like_others(plan):
    # transformers' own forward would pool before them.
    model = tiny_classifier()
    batch = flat_batch([[5, 6]], [[7, PAD, 9]])
    unpadded = copy.deepcopy(model)
    unpadded.config.pad_token_id = None
    assert_same(sequence_scores(model, batch, plan=plan), unpadded(torch.tensor([[5, 6, 7, PAD]])).logits)


def test_row_order_changes_nothing():
    model, batch, order = tiny_classifier(), ragged_pairs(), [5, 0, 3, 1, 2, 4]
    assert_same(sequence_scores(model, batch.select(order)), sequence_scores(model, batch)[order])


def test_auto_shares_prompts_where_rows_share_them_and_no_dropout_is_active(monkeypatch):
    used = []

    def lay_out(batch, plan, rules=None):
        used.append(plan)
        return plans.lay_out(batch, plan, rules)

    monkeypatch.setattr(forward, "lay_out", lay_out)
    model, batch = tiny_classifier(attention_dropout=0.1), ragged_pairs()
    sequence_scores(model, batch)
    sequence_scores(model, batch.select([3, 1]))
    sequence_scores(model.train(), batch)
    assert used == ["shared_prefix", "packed", "packed"]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_gradient_checkpointing_gives_equal_gradients(plan, use_reentrant):
    model, batch = tiny_classifier().train(), ragged_pairs()
    expected = gradient(model, sequence_scores(model, batch, plan=plan))
    checkpoint_activations(model, {"use_reentrant": use_reentrant})
    first = sequence_scores(model, batch, plan=plan)
    sequence_scores(model, batch.select([3, 0, 5]), plan=plan)  # another batch between a forward and its backward
    assert_same(gradient(model, first), expected)


@pytest.mark.parametrize("prepare_first", [True, False])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_lora_models_give_equal_numbers_and_gradients(targets, prepare_first, caplog):
    from peft import LoraConfig, get_peft_model

    model, batch = tiny_classifier(), ragged_pairs()
    base = sequence_scores(model, batch).detach() if prepare_first else None
    torch.manual_seed(0)
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(model, config).eval()
    model.base_model.model.score.modules_to_save["default"].weight.data.normal_()  # not the head that it copied
    assert_every_plan_is_the_plain_forward(model, batch)
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "lora" not in name}
    assert trained == {"base_model.model.score.modules_to_save.default.weight"}
    if base is not None:
        with model.disable_adapter():
            assert_same(sequence_scores(model, batch), base)
    assert warnings_of(caplog) == []


def test_prompt_learning_falls_back_to_padded_rows(caplog):
    from peft import PromptTuningConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(tiny_classifier(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)).eval()
    batch = ragged_pairs()
    expected = plain_scores(model, batch)
    assert_same(sequence_scores(model, batch), expected)
    assert_same(gradient(model, sequence_scores(model, batch)), gradient(model, plain_scores(model, batch)))
    assert "virtual tokens" in caplog.text


def assert_falls_back(model, batch, caplog, reason):
    expected = plain_scores(model, batch)
    expected_gradient = gradient(model, expected)
    for plan in ("auto", "padded"):
        scores = sequence_scores(model, batch, plan=plan)
        assert_same(scores, expected)
        assert_same(gradient(model, scores), expected_gradient)
    [message] = warnings_of(caplog)
    assert f"{type(model).__name__}: scores fall back from plan shared_prefix and packed to padded" in message
    assert reason in message
    for plan in ("shared_prefix", "packed"):
        with pytest.raises(ConfigError, match=f'plan="{plan}" does not work for {type(model).__name__}'):
            sequence_scores(model, batch, plan=plan)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_an_encoder_runs_its_own_forward_on_padded_rows(num_labels, caplog):
    model = tiny_classifier("bert", num_labels=num_labels)
    assert_falls_back(model, ragged_pairs(), caplog, "besides its base model, it has classifier, dropout")
    assert model.config._attn_implementation == "sdpa"


def test_a_base_model_that_attends_in_both_directions_is_never_scored_causally(caplog):
    model, batch = tiny_classifier(is_causal=False), ragged_pairs()
    causal = sequence_scores(tiny_classifier(), batch)
    assert (plain_scores(model, batch) - causal).abs().max() > 0.1  # the two differ
    assert_falls_back(model, batch, caplog, "Qwen2Attention uses is_causal=False")


@pytest.mark.parametrize("pad_token_id", [PAD, 77])
def test_dropout_before_the_head_is_kept_by_way_of_the_models_own_forward(pad_token_id, caplog):
    class WithDropout(type(tiny_classifier())):
        """What comes out of the base model is dropped, with probability 1, before the head reads it."""

        def __init__(self, config):
            super().__init__(config)
            self.dropout = nn.Dropout(1.0)
            self.model.norm.register_forward_hook(lambda module, inputs, output: self.dropout(output))

    plain = tiny_classifier(pad_token_id=pad_token_id)
    model, batch = WithDropout(plain.config), ragged_pairs()
    model.load_state_dict(plain.state_dict())
    assert_falls_back(model.eval(), batch, caplog, "besides its base model, it has dropout, score")
    assert_same(sequence_scores(model, batch), plain_scores(plain, batch))
    assert torch.count_nonzero(sequence_scores(model.train(), batch)) == 0


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_a_model_that_pools_at_the_first_token_keeps_its_own_forward(scale, caplog):
    model, batch = tiny_classifier(is_causal=False), ragged_pairs()
    model.score.weight.data.mul_(scale)  # however small the scores are

    def first_token(self, input_ids, attention_mask=None, **kwargs):
        hidden = self.model(input_ids, attention_mask, **kwargs).last_hidden_state
        return SequenceClassifierOutputWithPast(logits=self.score(hidden)[:, 0])

    model.forward = first_token.__get__(model)
    assert_falls_back(model, batch, caplog, "its scores differ from the plain forward's")


def test_scores_that_are_not_the_heads_are_the_models_own(caplog):
    model, batch = tiny_classifier(), ragged_pairs()
    plain = type(model).forward

    def squashed(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits.sigmoid()
        return output

    model.forward = squashed.__get__(model)
    assert_falls_back(model, batch, caplog, "its scores differ from the plain forward's")


def test_a_model_that_pools_at_padding_is_refused():
    model = tiny_classifier("xlnet", d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0)
    with pytest.raises(
        ConfigError, match=r"XLNetForSequenceClassification, whose scores change by .* if rows are padded"
    ):
        sequence_scores(model, ragged_pairs())


def test_a_model_that_pools_at_a_special_token_runs_its_own_forward(caplog):
    sizes = {"d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "max_position_embeddings": 64, "dropout": 0.0}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    special = {"eos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    model = tiny_classifier("bart", **sizes, **heads, **special)
    batch = flat_batch([[5, 6], [5, 6, 7]], [[9, 1, 3], [8, 9, 10, 1, 3]])  # each ends with 1, before its marker
    assert_falls_back(model, batch, caplog, "has classification_head")


def test_a_model_without_the_attention_interface_falls_back(caplog):
    assert_falls_back(tiny_classifier("bloom"), ragged_pairs(), caplog, "ValueError")


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_the_check_sees_wrong_attention_whatever_the_head_is(scale, monkeypatch):
    def fused(query, key, value, layout, **kwargs):
        trees = with_siblings_in_sight(layout.forest)
        return plain_flat(query, key, value, attention.Layout(trees), **kwargs)

    plain_flat = attention.flat_attention
    model = tiny_classifier()
    model.score.weight.data.mul_(scale)
    prepare_for_scoring(model)
    assert dict(selfcheck.check_plans(model).reasons) == {}
    monkeypatch.setattr(attention, "flat_attention", fused)  # a branch sees its sibling
    assert set(selfcheck.check_plans(model).reasons) == {"shared_prefix"}


def test_the_check_runs_without_padding_tokens_and_leaves_the_model_alone():
    model = tiny_classifier(pad_token_id=77).train()
    seen = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs.get("input_ids"), args)), with_kwargs=True
    )
    state = torch.get_rng_state()
    prepare_for_scoring(model)
    selfcheck.check_plans(model)
    handle.remove()
    ids = torch.cat([(args[0] if given is None else given).flatten() for given, args in seen])
    assert 77 not in ids
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert len(model.score._forward_pre_hooks) == 0


def test_bfloat16_plans_agree_and_scores_are_float32(caplog):
    model, batch = tiny_classifier().bfloat16(), ragged_pairs()
    expected = plain_scores(model, batch).float()
    for plan in PLANS:
        scores = sequence_scores(model, batch, plan=plan)
        assert scores.dtype == torch.float32
        assert (scores - expected).norm() <= 0.02 * expected.norm()
    assert warnings_of(caplog) == []


def test_without_a_request_the_forward_is_the_models_own():
    model, ids = tiny_classifier(), torch.arange(2, 12)[None]
    expected = model(input_ids=ids).logits
    sequence_scores(model, ragged_pairs())
    assert_same(model(ids).logits, expected)


def test_each_function_refuses_the_other_kind_of_model():
    batch = ragged_pairs()
    with pytest.raises(ConfigError, match=r"Qwen2ForSequenceClassification.*AutoModelForCausalLM"):
        token_logprobs(tiny_classifier(), batch)
    with pytest.raises(ConfigError, match=r"Qwen2ForCausalLM.*AutoModelForSequenceClassification"):
        sequence_scores(tiny_model("qwen2"), batch)
    with pytest.raises(ConfigError, match=r"Qwen2Model.*AutoModelForSequenceClassification"):
        sequence_scores(tiny_classifier().model, batch)
    tagger = AutoModelForTokenClassification.from_config(tiny_classifier().config)
    for function in (token_logprobs, sequence_scores):
        with pytest.raises(
            ConfigError, match="Qwen2ForTokenClassification, which has no language-model head and does"
        ):
            function(tagger, batch)


@pytest.mark.parametrize("plan", PLANS)
def test_an_empty_batch_is_an_error(plan):
    with pytest.raises(ValueError, match="0 rows"):
        sequence_scores(tiny_classifier(), ragged_pairs().select([]), plan=plan)
