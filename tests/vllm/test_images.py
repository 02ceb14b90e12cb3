"""Prompts with images on a real server: what it samples from is what the trainer computes of the same images."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from prefrl.data.images import ImageReader
from prefrl.data.tokenize import prepare_prompt_dataset
from prefrl.errors import GenerationError
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.models.export import PolicyWeights
from prefrl.models.images import placeholder_ids
from prefrl.trainer.configs import GRPOConfig
from prefrl.trainer.grpo_trainer import GRPOTrainer
from prefrl.types import Completion, Images
from tests.vllm.client import MakeGenerator, generators
from tests.vllm.conftest import StartServer
from tests.vllm.faults import GENERATE, drop, proxy_of, vanish
from tests.vllm.server import Server, save_tiny_vlm
from tests.vlms import image

pytestmark = pytest.mark.vllm

# The first two prompts have equal tokens. A transparent image, one of another shape, and no image at all follow.
PICTURES = [
    [image(seed=1)],
    [image(seed=2)],
    [image(seed=3).convert("RGBA"), image(size=(40, 90), seed=4)],
    [],
]
PICTURES[2][0].putalpha(100)
SEEDS = [1, 2, 3, 4]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server, None, None]:
    with start_server(save_tiny_vlm(tmp_path_factory.mktemp("vlm")), max_model_len=512) as running:
        yield running


@pytest.fixture(scope="module")
def processor(server: Server) -> Any:
    return AutoProcessor.from_pretrained(server.model_dir)


@pytest.fixture
def model(server: Server) -> PreTrainedModel:
    model: Any = AutoModelForImageTextToText.from_pretrained(server.model_dir, dtype=torch.float32)
    moved(model, "", seed=1)
    with torch.no_grad():  # as improbable as in a trained model
        model.get_output_embeddings().weight[placeholder_ids(model)] = 0.0
    return model


@pytest.fixture
def make(server: Server, model: PreTrainedModel, processor: Any, tmp_path: Path) -> Iterator[MakeGenerator]:
    with generators(model, tmp_path, key=server.key, tokenizer=processor.tokenizer) as make:
        yield lambda url=server.url: make([url], stop_ids=[2], never=placeholder_ids(model))


@pytest.fixture
def prompts(processor: Any) -> list[tuple[list[int], Images | None]]:
    return prompts_of(processor)


def moved(model: PreTrainedModel, part: str, *, seed: int) -> PreTrainedModel:
    """The model once the weights of some part of it have changed."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=0.03)
    return model


def rows() -> datasets.Dataset:
    question = "What color is the image?"
    return datasets.Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": question}] for _ in PICTURES], "images": PICTURES},
        features=datasets.Features(
            prompt=datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
            images=datasets.List(datasets.Image()),
        ),
    )


def prompts_of(processor: Any) -> list[tuple[list[int], Images | None]]:
    reader = ImageReader(processor)
    dataset = prepare_prompt_dataset(rows(), processor, max_prompt_length=None)
    return [(row["prompt_ids"], reader.of_prompt(row)) for row in dataset]


def sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"num_samples": 2, "max_tokens": 12} | changes)


def generate(
    generator: Any, prompts: Sequence[tuple[list[int], Images | None]], how: SamplingParams
) -> list[list[Completion]]:
    ids, images = [ids for ids, _ in prompts], [images for _, images in prompts]
    found: list[list[Completion]] = generator.generate(ids, how, seeds=SEEDS[: len(prompts)], images=images)
    return found


def logprobs_of(model: PreTrainedModel, ids: list[int], images: Images | None, tokens: list[int]) -> list[float]:
    """From the model's own forward, with the processor's output as it is and without placeholders of images."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids + tokens]), **({} if images is None else images.inputs))
    logits = output.logits[0, len(ids) - 1 : -1].index_fill(1, torch.tensor(placeholder_ids(model)), float("-inf"))
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return found


def check(
    model: PreTrainedModel, prompts: Sequence[tuple[list[int], Images | None]], groups: list[list[Completion]]
) -> None:
    for (ids, images), group in zip(prompts, groups, strict=True):
        for completion in group:
            expected = logprobs_of(model, ids, images, completion.token_ids)
            assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_logprobs_are_those_of_the_policy_with_the_prompts_own_images(
    model: PreTrainedModel, make: MakeGenerator, prompts: Any
) -> None:
    generator = make()
    generator.sync(PolicyWeights(model), version=1)
    groups = generate(generator, prompts, sampling())
    check(model, prompts, groups)
    (ids, _), (same_ids, other_image) = prompts[:2]
    assert ids == same_ids
    tokens = groups[0][0].token_ids
    of_other = logprobs_of(model, ids, other_image, tokens)
    assert groups[0][0].logprobs != pytest.approx(of_other, abs=100 * TOLERANCE), "the image decides nothing"
    assert generator.stats().requests == len(prompts), "not one request for each prompt"


@pytest.mark.parametrize("part", ["vision_model", "connector", "text_model"])
def test_an_image_that_the_server_knows_is_read_with_the_weights_of_each_sync(
    part: str, model: PreTrainedModel, make: MakeGenerator, prompts: Any
) -> None:
    generator = make()
    for version in (1, 2):
        generator.sync(PolicyWeights(model), version=version)
        groups = generate(generator, prompts[:1], sampling())
        check(model, prompts[:1], groups)
        moved(model, part, seed=version)
    (ids, images), tokens = prompts[0], groups[0][0].token_ids
    after = logprobs_of(model, ids, images, tokens)
    assert groups[0][0].logprobs != pytest.approx(after, abs=100 * TOLERANCE), "the weights decide nothing"


def test_greedy_completions_are_those_of_local_generation_and_have_no_placeholders(
    model: PreTrainedModel, make: MakeGenerator, processor: Any, prompts: Any
) -> None:
    generator, local = make(), LocalGenerator(model, tokenizer=processor.tokenizer)
    how = sampling(temperature=0, num_samples=1)
    likely = local.generate([prompts[0][0]], how, seeds=[1], images=[prompts[0][1]])[0][0].token_ids[0]
    head: Any = model.get_output_embeddings()
    with torch.no_grad():  # the first token would be a placeholder
        head.weight[placeholder_ids(model)] = 3 * head.weight[likely]
    generator.sync(PolicyWeights(model), version=3)
    local.sync(PolicyWeights(model), version=3)
    found = generate(generator, prompts, how)
    assert found == generate(local, prompts, how)
    stopping = sampling(temperature=0, num_samples=1, stop=(processor.tokenizer.decode(found[0][0].token_ids[2:4]),))
    cut = generate(generator, prompts, stopping)
    assert cut == generate(local, prompts, stopping)
    one, whole = cut[0][0], found[0][0].token_ids
    assert (one.finish_reason, one.token_ids) == ("stop_string", whole[: len(one.token_ids)])
    assert len(one.token_ids) < len(whole)
    assert found[0][0].token_ids[0] == likely


def test_lost_prompts_are_requested_again_with_their_images(
    server: Server, model: PreTrainedModel, make: MakeGenerator, prompts: Any
) -> None:
    with proxy_of(server.url) as proxy:
        generator = make(proxy.url)
        generator.sync(PolicyWeights(model), version=1)
        expected = generate(generator, prompts, sampling())
        requests = proxy.requests[GENERATE]
        proxy.fail(GENERATE, drop, times=len(prompts))
        vanish(proxy)
        assert generate(generator, prompts, sampling()) == expected
        assert proxy.requests[GENERATE] >= 3 * requests, "no request was lost"


def test_images_that_the_server_expands_otherwise_are_refused(
    model: PreTrainedModel, make: MakeGenerator, server: Server
) -> None:
    processor = AutoProcessor.from_pretrained(server.model_dir)
    processor.image_processor.size = {"longest_edge": 32}  # one tile where the server sees several
    generator = make()
    generator.sync(PolicyWeights(model), version=1)
    with pytest.raises(
        GenerationError, match=r"\d+ tokens on the server and \d+ in the trainer.*expand images in the same way"
    ):
        generate(generator, prompts_of(processor)[:1], sampling())


@pytest.mark.parametrize(
    "adapted", [[], ["q_proj", "v_proj"]], ids=["whole model", "adapter on the vision tower, too"]
)
def test_grpo_samples_with_the_images_of_each_prompt_and_the_weights_of_each_step(
    adapted: list[str],
    tmp_path: Path,
    server: Server,
    model: PreTrainedModel,
    processor: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", server.key)
    with proxy_of(server.url) as proxy:
        args = GRPOConfig(
            output_dir=str(tmp_path),
            use_vllm=True,
            vllm_server_base_url=proxy.url,
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=6,
            max_steps=3,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
        )
        adapter = LoraConfig(r=4, target_modules=adapted) if adapted else None
        trainer = GRPOTrainer(model, length_reward, args, rows(), processing_class=processor, peft_config=adapter)
        towers = {n: p for n, p in trainer.policy.named_parameters() if "vision_model" in n and p.requires_grad}
        before = {name: weight.detach().clone() for name, weight in towers.items()}
        trainer.train()
        trainer.generator.close()
    assert proxy.last_body[GENERATE]["sampling_params"]["logit_bias"].keys() == {*map(str, placeholder_ids(model))}
    history = trainer.state.log_history
    differences = [entry[name] for entry in history if (name := "sampling/sampling_logp_difference/max") in entry]
    assert len(differences) == 3
    assert max(differences) < 0.01, "more than the probability of placeholders, which are not sampled"
    assert any(not torch.equal(towers[name], before[name]) for name in before), "the images taught the model nothing"


def length_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    assert columns.keys().isdisjoint({"unexpanded_ids", "prompt_ids"})
    return [float(sum(ids) % 7) for ids in completion_ids]
