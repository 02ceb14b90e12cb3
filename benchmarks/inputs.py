"""The inputs of both libraries: the same random models, tokenizer, dataset rows, completions and reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from benchmarks.workloads import ModelSizes, Workload

__all__ = [
    "END",
    "PAD",
    "Completions",
    "TokenCounter",
    "add_noise",
    "build_model",
    "build_policy",
    "build_processor",
    "build_tokenizer",
    "completions_of",
    "prompts_of",
    "rows_of",
]

END, PAD, IMAGE = 0, 1, 2
Completions = dict[tuple[int, ...], list[list[int]]]  # of each prompt
NUM_SPECIAL = 2  # the image token is a word in workloads without images
POLICY_SEED, REFERENCE_SEED = 0, 1
PATCH = 14
TEMPLATE = (
    "{% for message in messages %}{% for block in message['content'] %}"
    "{{ '<image> ' if block['type'] == 'image' else block['text'] }}{% endfor %}{% endfor %}"
)
CHAT = "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"


def build_model(sizes: ModelSizes, *, seed: int, is_classifier: bool = False, device: str = "cpu") -> PreTrainedModel:
    """A model with random weights that depend only on sizes, seed and device, on which it is made."""
    torch.manual_seed(seed)
    auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
    if sizes.checkpoint:
        return _trained_model(auto_class, sizes.checkpoint, is_policy=seed == POLICY_SEED)
    with torch.device(device):
        return auto_class.from_config(_text_config(sizes), dtype=getattr(torch, sizes.dtype))


def _trained_model(auto_class: Any, folder: str, *, is_policy: bool) -> PreTrainedModel:
    """The model of a checkpoint, with the tokenizer's end and padding; a reference differs from it by some noise."""
    model = auto_class.from_pretrained(folder, dtype=torch.float32, pad_token_id=PAD, eos_token_id=END, num_labels=1)
    if (generation := getattr(model, "generation_config", None)) is not None:  # a classifier has none
        generation.eos_token_id, generation.pad_token_id = END, PAD
    return model if is_policy else add_noise(model)


def add_noise(model: PreTrainedModel) -> PreTrainedModel:
    """The model with each matrix changed by 1 % of its size, so that no log-ratio is zero."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += 0.01 * weight.std() * torch.randn_like(weight)
    return model  # type: ignore[no-any-return]


def build_policy(workload: Workload, *, seed: int, device: str = "cpu") -> PreTrainedModel:
    """The model of a workload of GRPO, with a vision tower if its prompts have images."""
    if not workload.image_side:
        return build_model(workload.model, seed=seed, device=device)
    sizes = workload.model
    config = LlavaConfig(
        text_config=_text_config(sizes),
        vision_config=CLIPVisionConfig(
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.ffn_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            image_size=workload.image_side,
            patch_size=PATCH,
        ),
        image_token_index=IMAGE,
        image_seq_length=(workload.image_side // PATCH) ** 2,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    torch.manual_seed(seed)
    return LlavaForConditionalGeneration(config)


def _text_config(sizes: ModelSizes) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.ffn_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads or sizes.num_heads // 2,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        eos_token_id=END,
        pad_token_id=PAD,
        bos_token_id=None,
        num_labels=1,
    )


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each of the words t2, t3, ..., and an end token."""
    return _tokenizer({"<end>": END, "<pad>": PAD, **{f"t{i}": i for i in range(NUM_SPECIAL, vocab_size)}})


def _tokenizer(vocabulary: dict[str, int], **options: Any) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", **options)


def build_processor(workload: Workload) -> Any:
    """The tokenizer of a workload with completions, or the processor if its prompts have images."""
    size = workload.model.vocab_size
    if not workload.image_side:
        tokenizer = build_tokenizer(size)
        tokenizer.chat_template = CHAT if workload.task == "gkd" else None
        return tokenizer
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil  # needs pillow

    vocabulary = {"<end>": END, "<pad>": PAD, "<image>": IMAGE, **{f"t{i}": i for i in range(IMAGE + 1, size)}}
    side = {"height": workload.image_side, "width": workload.image_side}
    return LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": workload.image_side}, crop_size=side),
        _tokenizer(vocabulary, additional_special_tokens=["<image>"]),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def prompts_of(workload: Workload) -> list[list[int]]:
    """[P] lists of token ids."""
    generator = torch.Generator().manual_seed(2)
    return [_tokens(workload, workload.prompt_length, generator) for _ in range(workload.num_prompts)]


def completions_of(workload: Workload) -> Completions:
    """For each prompt, [G] lists of token ids with the workload's lengths, which end with the end token."""
    generator = torch.Generator().manual_seed(3)
    return {
        tuple(prompt): [[*_tokens(workload, length - 1, generator), END] for length in workload.lengths]
        for prompt in prompts_of(workload)
    }


def rows_of(workload: Workload) -> Dataset:
    """The dataset for the workload's task. Both libraries append the end token to responses and texts."""
    generator = torch.Generator().manual_seed(4)

    def words(count: int) -> str:
        return _words(_tokens(workload, count, generator))

    if workload.image_side:
        return Dataset.from_list([_row_with_image(workload, prompt) for prompt in prompts_of(workload)])
    if workload.task == "gkd":
        rows = [(words(workload.prompt_length), words(length - 1)) for length in workload.lengths]
        roles = ("user", "assistant")
        turns = [[{"role": role, "content": text} for role, text in zip(roles, row, strict=True)] for row in rows]
        return Dataset.from_list([{"prompt": [asked], "completion": [said]} for asked, said in turns])
    if workload.is_online:
        return Dataset.from_list([{"prompt": _words(prompt)} for prompt in prompts_of(workload)])
    if workload.task == "sft":
        return Dataset.from_list([{"text": words(length - 1)} for length in workload.lengths])
    responses = [" " + words(length - 1) for length in workload.lengths]
    if workload.task == "kto":
        return Dataset.from_list(
            [
                {"prompt": words(workload.prompt_length), "completion": response, "label": number % 2 == 0}
                for number, response in enumerate(responses)
            ]
        )
    return Dataset.from_list(
        [
            {"prompt": words(workload.prompt_length), "chosen": chosen, "rejected": rejected}
            for chosen, rejected in zip(responses[::2], responses[1::2], strict=True)
        ]
    )


@dataclass
class TokenCounter:
    """Counts the completion tokens that a library passes to its reward function."""

    total: int = 0

    def reward(self) -> Callable[..., list[float]]:
        """A deterministic reward that differs within a group, so that no advantage is zero."""

        def hashed(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
            self.total += sum(map(len, completion_ids))
            return [sum(ids) % 1009 / 1009 for ids in completion_ids]

        return hashed


def _row_with_image(workload: Workload, prompt: Sequence[int]) -> dict[str, Any]:
    from PIL import Image  # an extra

    pixels = torch.randint(
        256, (workload.image_side, workload.image_side, 3), generator=torch.Generator().manual_seed(5)
    )
    picture = Image.fromarray(pixels.to(torch.uint8).numpy())
    return {"prompt": [{"role": "user", "content": _words(prompt)}], "image": picture}


def _tokens(workload: Workload, count: int, generator: torch.Generator) -> list[int]:
    first = IMAGE + 1 if workload.image_side else NUM_SPECIAL
    return torch.randint(first, workload.model.vocab_size, (count,), generator=generator).tolist()


def _words(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)
