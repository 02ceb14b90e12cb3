"""References: their scores, their cost, and the copy that does not move."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefrl.errors import ConfigError
from prefrl.models import forward
from prefrl.models import reference as reference_module
from prefrl.models.fingerprint import weights_fingerprint
from prefrl.models.forward import Scoring, scores_in_pieces, token_logprobs
from prefrl.models.reference import Reference, create_reference_model, make_reference
from prefrl.models.scoring import prepare_for_scoring
from prefrl.models.teachers import Teachers
from prefrl.types import TokenBatch
from tests.assets import ragged_batch, tiny_model

peft = pytest.importorskip("peft")


BATCH = ragged_batch()


def scores(model: nn.Module, temperature: float = 0.7) -> Tensor:
    """[N] from the padded plan, with dropout off."""
    with torch.no_grad():
        return token_logprobs(copy.deepcopy(model).eval(), BATCH, temperature=temperature, plan="padded").logprobs


def lora_model(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = peft.LoraConfig(**({"target_modules": "all-linear", "lora_dropout": 0.5, "r": 4} | options))
    return peft.get_peft_model(tiny_model("llama"), config)  # type: ignore[no-any-return]


def train(model: nn.Module) -> None:
    """Move every trainable parameter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def made(model: PreTrainedModel, **options: Any) -> Reference:
    reference = make_reference(model, beta=0.1, **options)
    assert reference is not None
    return reference


def plain() -> PreTrainedModel:
    return tiny_model("qwen2", attention_dropout=0.5)


def prepared() -> PreTrainedModel:
    model = plain()
    prepare_for_scoring(model)
    token_logprobs(model, BATCH)  # the first use checks the plans and installs our attention
    return model


def trained_lora(**options: Any) -> PreTrainedModel:
    model = lora_model(**options)
    train(model)
    return model


def beside_frozen(model: PreTrainedModel) -> PreTrainedModel:
    """With an adapter named "ref" that does something and is neither active nor trained, as users of TRL load one."""
    model.add_adapter("ref", peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    model.set_adapter("ref")
    train(model)
    model.set_adapter("default")
    assert not any(p.requires_grad for name, p in model.named_parameters() if ".ref." in name)
    return model


def lora_with_saved_module() -> PreTrainedModel:
    return lora_model(target_modules=["q_proj"], modules_to_save=["lm_head"])


def frozen_part(options: dict[str, Any], name: str) -> PreTrainedModel:
    """An adapter of which only one part was trained, which is frozen now; its B matrices are 0."""
    model = lora_model(**options)
    for parameter_name, parameter in model.named_parameters():
        if name in parameter_name and parameter.requires_grad:
            with torch.no_grad():
                parameter.mul_(1.5)
            parameter.requires_grad_(False)
    return model


def pissa() -> PreTrainedModel:
    return lora_model(init_lora_weights="pissa")  # changes the base model: with the adapter off it is another one


def lora_with_trainable_base() -> PreTrainedModel:
    model = lora_model()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


CASES = {
    "plain": plain,
    "prepared": prepared,
    "fresh lora": lora_model,
    "trained lora": trained_lora,
    "lora with modules_to_save": lora_with_saved_module,
    "pissa": pissa,
    "lora with a trainable base parameter": lora_with_trainable_base,
    "dora": lambda: lora_model(use_dora=True),
    "dora with a frozen magnitude": lambda: frozen_part({"use_dora": True}, "magnitude"),
    "lora with a frozen saved module": lambda: frozen_part(
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"
    ),
    "rslora with a rank for each layer": lambda: lora_model(use_rslora=True, rank_pattern={"q_proj": 2, "up_proj": 6}),
    "trained rslora with a rank for each layer": lambda: trained_lora(
        use_rslora=True, rank_pattern={"q_proj": 2, "up_proj": 6}
    ),
    "lora on the head": lambda: lora_model(target_modules=["q_proj", "lm_head"]),
    "trained lora on the head": lambda: trained_lora(target_modules=["q_proj", "lm_head"]),
    "lora on embeddings": lambda: lora_model(target_modules=["embed_tokens"]),
    "trained lora beside a frozen adapter": lambda: beside_frozen(trained_lora()),
    "fresh lora beside a frozen adapter": lambda: beside_frozen(lora_model()),
    "ia3": lambda: peft.get_peft_model(tiny_model("llama"), peft.IA3Config(task_type="CAUSAL_LM")),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return request.param()  # type: ignore[no-any-return]


def test_no_kl_needs_no_reference() -> None:
    assert make_reference(plain(), beta=0.0) is None


@pytest.mark.parametrize("moves", [False, True])
def test_the_reference_scores_with_the_weights_of_construction_and_has_their_fingerprint(
    model: PreTrainedModel, moves: bool
) -> None:
    before, name = scores(model), weights_fingerprint(model)
    reference = made(model, moves=moves)
    train(model.train())
    after = scores(model)
    assert float((after - before).abs().max()) > 0.01
    assert weights_fingerprint(model) != name
    assert reference.fingerprint() == name
    torch.testing.assert_close(reference.logprobs(BATCH, Scoring(0.7)), before, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores(model), after, atol=0, rtol=0)


def test_scoring_leaves_the_policy_as_it_was(model: PreTrainedModel) -> None:
    model.train()
    next(module for module in model.modules() if isinstance(module, nn.Linear)).eval()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trainable[0].requires_grad_(False)  # what `freeze` does, also to a part of an adapter
    reference = made(model)
    required = [parameter.requires_grad for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    identities = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    logprobs = reference.logprobs(BATCH, Scoring(1.0))
    assert not logprobs.requires_grad
    assert [parameter.requires_grad for parameter in model.parameters()] == required
    assert [module.training for module in model.modules()] == modes
    assert [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()] == identities
    assert all(a.equal(b) for a, b in zip(model.parameters(), weights, strict=True))
    if reference_module.is_peft_model(model):
        assert model.active_adapter == "default"
        assert model.get_model_status().enabled != "irregular"


@pytest.mark.parametrize("build", [plain, lora_model, trained_lora])
def test_an_error_while_scoring_leaves_the_policy_as_it_was(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build().train()
    reference = made(model)
    train(model)
    expected, required = scores(model), [parameter.requires_grad for parameter in model.parameters()]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(forward, "token_logprobs", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            reference.logprobs(BATCH, Scoring(1.0))
    assert scores(model).equal(expected)
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == required


def test_a_copy_shares_nothing_with_the_policy() -> None:
    model = plain().train()
    reference = made(model)
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    assert not addresses & {weight.data_ptr() for weight in reference.state_dict().values()}
    assert not any(weight.requires_grad for weight in reference.state_dict().values())


def test_a_fresh_adapter_costs_no_memory() -> None:
    assert made(lora_model()).state_dict() == {}
    assert made(lora_model(target_modules=["q_proj", "lm_head", "embed_tokens"])).state_dict() == {}
    assert made(trained_lora()).state_dict().keys() == {
        name for name, parameter in trained_lora().named_parameters() if parameter.requires_grad
    }


@pytest.mark.parametrize("max_tokens", [1, 9, 12, 1000])
@pytest.mark.parametrize("build", [plain, lora_model, trained_lora])
def test_pieces_keep_the_order_of_rows(build: Any, max_tokens: int) -> None:
    model = build()
    whole = made(model).logprobs(BATCH, Scoring(0.7))
    pieces = made(model).logprobs(BATCH, Scoring(0.7), max_tokens=max_tokens)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=0)
    assert not pieces[~BATCH.trainable].any()


def test_pieces_hold_at_most_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def note(model: nn.Module, batch: TokenBatch, **options: Any) -> Any:
        sizes.append(batch.num_forward_tokens)
        return token_logprobs(model, batch, **options)

    monkeypatch.setattr(forward, "token_logprobs", note)
    scores_in_pieces(plain(), BATCH, Scoring(), max_tokens=13)
    assert len(sizes) > 1
    assert max(sizes) <= 13


@pytest.mark.parametrize("build", [plain, lora_model, trained_lora])
def test_mixing_moves_the_reference_by_alpha_towards_the_policy(build: Any) -> None:
    model = build()
    reference = made(model, moves=True)
    start = {name: weight.clone() for name, weight in reference.state_dict().items()}
    train(model)
    now = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    reference.mix(model, 0.25)
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(weight, 0.25 * now[name] + 0.75 * start[name])
    assert all(parameter.equal(now[name]) for name, parameter in model.named_parameters())
    reference.mix(model, 1.0)
    torch.testing.assert_close(reference.logprobs(BATCH, Scoring(0.7)), scores(model), atol=1e-5, rtol=0)


def test_a_reference_with_its_adapter_off_cannot_move() -> None:
    model = lora_model()
    with pytest.raises(ConfigError, match="cannot move"):
        made(model).mix(model, 0.5)


@pytest.mark.parametrize("build", [plain, trained_lora])
def test_a_moved_reference_can_be_saved_and_read(build: Any, tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    model = build()
    reference = made(model, moves=True)
    train(model)
    reference.mix(model, 0.5)
    expected = reference.logprobs(BATCH, Scoring(1.0))
    save_file(reference.state_dict(), tmp_path / "reference.safetensors")
    other = made(build(), moves=True)
    assert not other.logprobs(BATCH, Scoring(1.0)).equal(expected)
    other.load_state_dict(load_file(tmp_path / "reference.safetensors"))
    assert other.logprobs(BATCH, Scoring(1.0)).equal(expected)


def test_tied_weights_are_saved_once_and_stay_tied() -> None:
    reference = made(tiny_model("gpt2"), moves=True)
    state = reference.state_dict()
    assert len({weight.data_ptr() for weight in state.values()}) == len(state)
    other = tiny_model("gpt2", seed=5)
    reference.mix(other, 1.0)
    torch.testing.assert_close(reference.logprobs(BATCH, Scoring(0.7)), scores(other), atol=1e-5, rtol=0)


def test_a_saved_reference_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="the saved reference has different parameters"):
        made(plain(), moves=True).load_state_dict(made(tiny_model("gpt2"), moves=True).state_dict())
    with pytest.raises(ConfigError, match="the saved reference has different parameters"):
        made(lora_model()).load_state_dict(made(trained_lora()).state_dict())


def test_the_gradient_of_the_policy_is_not_touched_by_scoring_in_between() -> None:
    model = trained_lora().eval()
    reference = made(model)
    train(model)
    gradients = []
    for scores_reference in (False, True):
        model.zero_grad()
        if scores_reference:
            reference.logprobs(BATCH, Scoring(1.0))
        token_logprobs(model, BATCH).logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert gradients[0].equal(gradients[1])
    assert float(gradients[0].abs().sum()) > 0


# A reference that the user gives.


def trained_ref_model() -> PreTrainedModel:
    return tiny_model("llama", seed=3, attention_dropout=0.5).train()


@pytest.mark.parametrize("moves", [False, True])
def test_a_given_model_scores_as_it_is(moves: bool) -> None:
    given, policy = trained_ref_model(), tiny_model("llama", attention_dropout=0.5)
    before = scores(given)
    weights = copy.deepcopy(given.state_dict())
    reference = made(policy, given=given, moves=moves)
    train(policy.train())
    logprobs = reference.logprobs(BATCH, Scoring(0.7))
    torch.testing.assert_close(logprobs, before, atol=1e-5, rtol=0)
    assert not logprobs.requires_grad
    assert all(module.training for module in given.modules())
    assert all(weight.equal(weights[name]) for name, weight in given.state_dict().items())


def test_a_given_model_of_another_architecture_or_with_an_adapter_can_be_the_reference() -> None:
    for given in (tiny_model("qwen2", seed=4), trained_lora()):
        for policy in (tiny_model("llama"), lora_model()):
            reference = made(policy, given=given)
            torch.testing.assert_close(reference.logprobs(BATCH, Scoring(0.7)), scores(given), atol=1e-5, rtol=0)


def test_a_given_model_is_copied_only_if_it_moves() -> None:
    given, policy = trained_ref_model(), tiny_model("llama")
    addresses = {parameter.data_ptr() for parameter in given.parameters()}
    assert {weight.data_ptr() for weight in made(policy, given=given).state_dict().values()} == addresses
    before = copy.deepcopy(given.state_dict())
    reference = made(policy, given=given, moves=True)
    reference.mix(policy, 0.25)
    assert all(weight.equal(before[name]) for name, weight in given.state_dict().items())
    now = policy.state_dict()
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(weight, 0.25 * now[name] + 0.75 * before[name])


def test_a_given_model_that_cannot_be_the_reference_is_refused() -> None:
    policy, adapted = tiny_model("llama"), lora_model()
    with pytest.raises(ConfigError, match=r"ref_model is the model that is trained.* Leave ref_model=None"):
        made(policy, given=policy)
    with pytest.raises(ConfigError, match="ref_model shares trained parameters with the model"):
        made(adapted, given=adapted.get_base_model())
    with pytest.raises(ConfigError, match="ref_model has a vocabulary of 64 tokens, but the model has 128"):
        made(adapted, given=tiny_model("llama", vocab_size=64))
    with pytest.raises(ConfigError, match="ref_model has no effect with beta=0"):
        make_reference(policy, beta=0.0, given=trained_ref_model())
    for other in (tiny_model("qwen2"), tiny_model("llama", intermediate_size=32), lora_model()):
        with pytest.raises(ConfigError, match="sync_ref_model=True mixes the two models parameter by parameter"):
            made(policy, given=other, moves=True)
    with pytest.raises(ConfigError, match="which has no language-model head"):
        made(policy, given=trained_ref_model().model)


# Fingerprints.


def test_a_fresh_adapter_and_a_given_model_have_the_fingerprint_of_their_base_model() -> None:
    base = weights_fingerprint(tiny_model("llama"))
    assert made(tiny_model("llama")).fingerprint() == base
    assert made(lora_model()).fingerprint() == base
    assert made(lora_model(r=2), moves=True).fingerprint() == base
    assert made(trained_lora(), given=tiny_model("llama")).fingerprint() == base
    assert made(trained_lora()).fingerprint() != base


def test_the_fingerprint_is_computed_once_unless_the_reference_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[nn.Module] = []

    def note(model: nn.Module) -> str:
        calls.append(model)
        return weights_fingerprint(model)

    monkeypatch.setattr(reference_module, "weights_fingerprint", note)
    model = trained_lora()
    reference = made(model, moves=True)
    assert not calls
    first = reference.fingerprint()
    assert reference.fingerprint() == first
    assert len(calls) == 1
    state = copy.deepcopy(reference.state_dict())
    train(model)
    reference.mix(model, 0.5)
    assert reference.fingerprint() != first
    reference.load_state_dict(state)
    assert reference.fingerprint() == first


def test_the_fingerprint_of_several_teachers_is_that_of_each_under_its_name() -> None:
    one, two = (made(tiny_model("llama"), given=tiny_model("llama", seed=seed)) for seed in (1, 2))
    cases = (([one, two], "ab"), ([two, one], "ab"), ([one, one], "ab"), ([one, two], "ac"))
    assert len({Teachers(teachers, names).fingerprint() for teachers, names in cases}) == len(cases)


def test_a_copy_is_frozen_and_keeps_its_weights_when_the_model_changes() -> None:
    model = tiny_model().train()
    reference = create_reference_model(model)
    assert not reference.training
    assert model.training
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    for weight, kept in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(weight, kept)
        assert weight.data_ptr() != kept.data_ptr()


@pytest.mark.parametrize(
    ("architecture", "pattern"), [("qwen2", None), ("gpt2", None), ("gpt2", "transformer.h.{layer}")]
)
def test_shared_layers_are_the_same_memory_and_frozen_in_both(architecture: str, pattern: str | None) -> None:
    model = tiny_model(architecture)
    reference = create_reference_model(model, num_shared_layers=1, pattern=pattern)
    for (name, weight), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        is_shared = "embed_tokens" in name or ".wte." in name or ".wpe." in name or ".0." in name
        assert (weight.data_ptr() == other.data_ptr()) is is_shared, name
        assert weight.requires_grad is not is_shared
        assert not other.requires_grad


@pytest.mark.parametrize(("number", "pattern"), [(2, None), (1, "decoder.{layer}")])
def test_a_layer_that_is_not_there_is_refused(number: int, pattern: str | None) -> None:
    with pytest.raises(ConfigError, match=rf"num_shared_layers={number}, pattern=.*no parameter has a name like this"):
        create_reference_model(tiny_model(), num_shared_layers=number, pattern=pattern)
