"""Operations counted by hand, by the formula and by the counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, BertConfig

from prefrl.data.collate import flat_batch
from prefrl.errors import ConfigError
from prefrl.losses.logprobs import Head, chunked_logprobs
from prefrl.models.classifier import sequence_scores
from prefrl.models.flops import FlopCounter, ModelCost, Products, floor_flops, model_cost, recomputed_share
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.modes import checkpoint_activations
from prefrl.models.scoring import prepare_for_scoring
from prefrl.types import IdleBatch, TokenBatch
from tests.assets import tiny_model, tiny_reward_model

# tiny_model: 2 layers, h = 32, 4 heads of 8 for queries and 2 for keys and values, 64 inner, V = 128.
WEIGHTS = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 64)
HEAD = 32 * 128
SIZE = 4 * 8


def batch_of_a_group() -> TokenBatch:
    """A prompt of 20; responses of 4, 2 and 9, of which 3, 1 and 8 tokens are fed."""
    return flat_batch([[5] * 20] * 3, [[1, 2, 3, 4], [1, 2], [1] * 9], groups=[0, 0, 0])


def test_floor_of_a_group_is_the_formula() -> None:
    """2 n (P + sum T) + 2 h V sum M + 2 a L [P^2 + sum((P + T)^2 - P^2)], three times if everything is trained."""
    cost = model_cost(tiny_model())
    pairs = 20**2 + (23**2 - 20**2) + (21**2 - 20**2) + (28**2 - 20**2)
    forward = 2 * WEIGHTS * (20 + 3 + 1 + 8) + 2 * HEAD * (4 + 2 + 9) + 2 * SIZE * 2 * pairs
    assert floor_flops(cost, [batch_of_a_group()], trains=False) == forward
    assert floor_flops(cost, [batch_of_a_group()], trains=True) == 3 * forward


def test_only_scored_tokens_reach_the_head() -> None:
    cost = model_cost(tiny_model())
    batch = flat_batch([[5] * 20], [[1, 2, 3, 4]], trainable=[[False, True, False, True]])
    plain = floor_flops(cost, [flat_batch([[5] * 20], [[1, 2, 3, 4]])], trains=False)
    assert plain - floor_flops(cost, [batch], trains=False) == 2 * 2 * HEAD


def test_a_prompt_is_needed_once_for_its_group_and_an_idle_batch_not_at_all() -> None:
    cost = model_cost(tiny_model())
    whole = floor_flops(cost, [batch_of_a_group()], trains=True)
    assert floor_flops(cost, batch_of_a_group().chunks(1), trains=True) == whole
    apart = batch_of_a_group().replace(group_index=(0, 1, 2)).chunks(1)
    prompt = 2 * WEIGHTS * 20 + 2 * SIZE * 2 * 20**2
    assert floor_flops(cost, apart, trains=True) == whole + 2 * 3 * prompt
    assert floor_flops(cost, [IdleBatch.of(flat_batch([[1]], [[2]]))], trains=True) == 0


def test_a_row_behind_a_longer_prompt_of_its_group_has_its_own_prompt() -> None:
    cost = ModelCost(token=Products(1, 0), position=Products(0, 0), pair={}, scores_rows=False)
    batch = flat_batch([[5] * 20, [5] * 21], [[1, 2], [3]], groups=[0, 0])
    assert floor_flops(cost, [batch], trains=False) == 20 + 1 + 21


def test_a_window_bounds_the_keys_of_a_token() -> None:
    """Of 10 tokens the first 4 see 4^2 / 2 pairs, the other 6 see 4 keys each."""
    cost = ModelCost(token=Products(0, 0), position=Products(0, 0), pair={4: Products(1, 0)}, scores_rows=False)
    assert floor_flops(cost, [flat_batch([[5] * 3], [[1] * 8])], trains=False) == 4**2 / 2 + 6 * 4


def test_a_classifier_scores_rows() -> None:
    cost = model_cost(tiny_reward_model(num_labels=3))
    assert cost.scores_rows
    assert cost.position == Products(2 * 32 * 3, 4 * 32 * 3)
    batch = flat_batch([[5] * 20] * 2, [[1, 2, 0], [3, 0]], groups=[0, 0])
    pairs = 20**2 + (22**2 - 20**2) + (21**2 - 20**2)
    forward = 2 * WEIGHTS * 23 + 2 * 2 * 32 * 3 + 2 * SIZE * 2 * pairs
    assert floor_flops(cost, [batch], trains=False) == forward


def frozen(model: Any, *parts: str) -> Any:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in parts))
    return model


def lora(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))


MODELS: dict[str, Callable[[], Any]] = {
    "all": tiny_model,
    "untied head": lambda: tiny_model(tie_word_embeddings=False),
    "lowest layer frozen": lambda: frozen(tiny_model(tie_word_embeddings=False), "embed", "layers.0"),
    "embeddings frozen": lambda: frozen(tiny_model(tie_word_embeddings=False), "embed"),
    "head alone": lambda: frozen(tiny_model(tie_word_embeddings=False), "model."),
    "lora": lambda: lora(tiny_model()),
    "gpt2": lambda: tiny_model("gpt2"),
    "windows": lambda: tiny_model("mistral", sliding_window=6),
}


def counted(model: nn.Module, batch: TokenBatch) -> FlopCounter:
    """A training pass."""
    prepare_for_scoring(model)
    model.train()
    verdict_of(model)
    with FlopCounter() as counter:
        token_logprobs(model, batch).logprobs.sum().backward()
    return counter


@pytest.mark.parametrize("name", MODELS)
def test_linear_layers_run_as_often_as_they_need(name: str) -> None:
    """The head, too: where little is scored its probabilities are kept for backward."""
    model = MODELS[name]()
    cost = model_cost(model)
    batch = batch_of_a_group()
    operators = counted(model, batch).by_operator
    linear = sum(flops for operator, flops in operators.items() if "mm" in operator)
    without_attention = ModelCost(cost.token, cost.position, {}, scores_rows=False)
    floor = floor_flops(without_attention, [batch], trains=True)
    assert linear == floor
    assert floor < floor_flops(cost, [batch], trains=True) <= sum(operators.values())


def test_attention_runs_whole_rectangles_behind_a_prompt_and_five_products_in_backward() -> None:
    operators = counted(tiny_model(), batch_of_a_group()).by_operator
    pairs = 20 * 20 / 2 + 3 * 23 + 1 * 21 + 8 * 28
    forward = 2 * 2 * 2 * SIZE * pairs  # 2 layers, 2 products
    assert operators["_scaled_dot_product_flash_attention_for_cpu"] == forward
    assert operators["_scaled_dot_product_flash_attention_for_cpu_backward"] == 2.5 * forward


def test_lora_trains_its_own_products_and_passes_gradients_through_the_others() -> None:
    cost = model_cost(lora(tiny_model()))
    adapters = 2 * 4 * ((32 + 32) + (64 + 32))  # 2 layers of q_proj and down_proj
    assert cost.token.forward == 2 * (WEIGHTS + adapters)
    # In the lowest layer nothing needs a gradient of what q, k, v and q's A read.
    without_gradient = 32 * 32 + 2 * 32 * 16 + 4 * 32
    assert cost.token.backward == 2 * (WEIGHTS + adapters - without_gradient) + 2 * adapters
    assert cost.position == Products(2 * HEAD, 2 * HEAD)
    assert model_cost(lora(tiny_model()), with_adapter=False).token.forward == 2 * WEIGHTS


@pytest.mark.parametrize(("use_reentrant", "is_exact"), [(False, True), (True, False)])
def test_checkpointing_runs_the_blocks_once_more(use_reentrant: bool, is_exact: bool) -> None:
    """The last product of a layer is left out, whose output backward does not read; but not by reentrant ones."""
    model = tiny_model()
    cost, batch = model_cost(model), batch_of_a_group()
    plain = sum(flops for name, flops in counted(model, batch).by_operator.items() if "mm" in name)
    checkpoint_activations(model, {"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    again = sum(flops for name, flops in counted(model, batch).by_operator.items() if "mm" in name) - plain
    assert recomputed_share(model) == 1.0
    floor = [floor_flops(cost, [batch], trains=True, recomputed_share=share) for share in (0.0, 1.0)]
    pairs = 20**2 + (23**2 - 20**2) + (21**2 - 20**2) + (28**2 - 20**2)
    assert floor[1] - floor[0] == 2 * (WEIGHTS - 2 * 32 * 64) * 32 + 2 * SIZE * 2 * pairs
    assert again == 2 * (WEIGHTS - is_exact * 2 * 32 * 64) * 32


def test_every_second_layer_is_half_of_them() -> None:
    model = tiny_model()
    assert recomputed_share(model) == 0.0
    checkpoint_activations(model, {"every_n_layers": 2, "use_reentrant": True})
    assert recomputed_share(model) == 0.5


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = tiny_model().train()
    generator = torch.get_rng_state()
    model_cost(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)


def bert() -> Any:
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=1
    )
    return AutoModelForSequenceClassification.from_config(config)


def flash() -> Any:
    model = tiny_model()
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


def quantized() -> Any:
    model = tiny_model()
    model.is_quantized = True
    return model


REFUSED = [
    pytest.param(lambda: tiny_model("mixtral"), "mlp.experts run for some tokens only", id="experts"),
    pytest.param(bert, "both directions", id="encoder"),
    pytest.param(flash, "flash_attention_2", id="kernel"),
    pytest.param(quantized, "quantized", id="quantized"),
    pytest.param(lambda: tiny_model().to("meta"), "device meta", id="device"),
    pytest.param(
        lambda: tiny_model("lfm2", layer_types=["conv", "full_attention"]), "layers of type conv", id="convolution"
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_models_whose_floor_is_not_known_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"log_flops=True: .*{message}.* Set log_flops=False"):
        model_cost(make())


def gradients(run: Callable[[], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(run(), tensors))


def test_counting_changes_no_bit() -> None:
    """torch's own counter takes operators such as the backward of SiLU apart, which does."""
    model = tiny_model().train()
    prepare_for_scoring(model)
    batch, parameters = batch_of_a_group(), list(model.parameters())

    def run() -> Tensor:
        return token_logprobs(model, batch, want=("entropy",)).logprobs.sum()

    verdict_of(model)
    plain = gradients(run, parameters)
    with FlopCounter():
        observed = gradients(run, parameters)
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))


def test_products_are_counted_as_torchs_counter_counts_them() -> None:
    x, weight = torch.randn(2, 3, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    bias = torch.zeros(7, requires_grad=True)

    def run() -> None:
        y = nn.functional.linear(x, weight, bias)
        torch.bmm(y, y.transpose(1, 2)).sum().backward()

    with FlopCounterMode(display=False) as theirs:
        run()
    with FlopCounter() as ours:
        run()
    linear, product = 2 * 6 * 5 * 7, 2 * 2 * 3 * 3 * 7
    assert ours.total == theirs.get_total_flops() == 3 * (linear + product)


@pytest.mark.parametrize(("keep_bytes", "products_in_backward"), [(0, 3), (10 * 7 * 4, 2)])
@pytest.mark.parametrize("bias", [None, torch.zeros(7)], ids=["mm", "addmm"])
def test_products_of_the_chunked_head_are_counted(
    bias: Tensor | None, keep_bytes: int, products_in_backward: int
) -> None:
    """Logits in forward; in backward the same again unless they are kept, and the two gradients."""
    hidden, weight = torch.randn(10, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    product = 2 * 10 * 5 * 7
    with FlopCounter() as counter:
        scores = chunked_logprobs(
            hidden,
            torch.zeros(10, dtype=torch.long),
            Head(weight, bias),
            temperature=1.0,
            want=(),
            chunk_size=4,
            keep_bytes=keep_bytes,
        )
    assert counter.total == product
    with FlopCounter() as counter:
        scores.logprobs.sum().backward()
    assert counter.total == products_in_backward * product
    assert counter.by_operator["addmm_"] == product


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(("num_keys", "masked", "pairs"), [(6, False, 18), (6, True, 36), (9, True, 54)])
def test_attention_on_the_cpu_is_counted(num_keys: int, masked: bool, pairs: int, kv_heads: int) -> None:
    query = torch.randn(1, 4, 6, 8, requires_grad=True)
    key, value = (torch.randn(1, kv_heads, num_keys, 8, requires_grad=True) for _ in range(2))
    mask = torch.zeros(6, num_keys) if masked else None
    with FlopCounter() as counter:
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=not masked, enable_gqa=kv_heads == 1
        )
    assert counter.total == 2 * 2 * 4 * 8 * pairs
    with FlopCounter() as counter:
        output.sum().backward()
    assert counter.total == 5 * 2 * 4 * 8 * pairs


def test_a_classifiers_pass_needs_what_it_runs_but_for_attention() -> None:
    model = tiny_reward_model().train()
    prepare_for_scoring(model)
    batch = flat_batch([[5] * 20] * 2, [[1, 2, 0], [3, 0]], groups=[0, 0])
    cost = model_cost(model)
    verdict_of(model)
    with FlopCounter() as counter:
        sequence_scores(model, batch).sum().backward()
    linear = sum(flops for operator, flops in counter.by_operator.items() if "mm" in operator)
    without_attention = ModelCost(cost.token, cost.position, {}, scores_rows=True)
    assert linear == floor_flops(without_attention, [batch], trains=True)


def test_size_of_heads_may_be_given_beside_the_hidden_size() -> None:
    cost = model_cost(tiny_model("qwen3", head_dim=16))
    assert cost.pair == {None: Products(2 * 4.0 * 4 * 16, 2 * 8.0 * 4 * 16, 2 * 4.0 * 4 * 16)}
