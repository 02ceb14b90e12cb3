"""Tiny vision-language models of five families, with processors, that tests make on the spot.

Only pillow is needed: the image processors are those of transformers that work on PIL images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from prefrl.models.classifier import add_classifier

if TYPE_CHECKING:
    import pytest  # benchmarks, too, import this module

__all__ = ["FAMILIES", "forget_classifiers", "image", "qwen3_vl_mixture", "tiny_vision_judge", "tiny_vlm"]

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% for block in m['content'] %}{% if block['type'] == 'image' %}PLACEHOLDER{% else %}{{ block['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
IDEFICS_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<fake_token_around_image>", "<image>"]
IDEFICS_TOKENS += [
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)),
]
LLAVA_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"]
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
GEMMA_TOKENS += ["<|im_start|>", "<|im_end|>"]

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 1024}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def image(
    color: tuple[int, int, int] | None = None, *, size: tuple[int, int] = (84, 56), seed: int = 0
) -> Image.Image:
    """An image of one color, or of random pixels; `size` is width and height."""
    if color is not None:
        return Image.new("RGB", size, color)
    pixels = np.random.RandomState(seed).randint(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def tiny_vlm(family: str, *, seed: int = 0, text: Mapping[str, Any] | None = None) -> tuple[PreTrainedModel, Any]:
    """A random model in float32 and eval mode, and its processor; `text` changes the config of the language model."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, processor = FAMILIES[family]()
        if text is not None:
            model.config.text_config.update(text)
            model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings
            model = type(model)(model.config)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:  # larger than usual, so that outputs differ clearly between tokens and images
                parameter.data.normal_(0.0, 0.1 if "vis" in name or "proj" in name else 0.2)
    return model.eval(), processor


def tiny_vision_judge(family: str, *, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """A reward model with the body of `tiny_vlm` and a random head, and its processor."""
    model, processor = tiny_vlm(family, seed=seed)
    model.config.num_labels = 1
    add_classifier(model.config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        judge = AutoModelForSequenceClassification.from_config(model.config, dtype=torch.float32)
        judge.score.weight.data.normal_(0.0, 0.2)
    judge.model.load_state_dict(model.base_model.state_dict())
    return judge.eval(), processor


def forget_classifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, transformers knows its own sequence classifiers only."""
    monkeypatch.setattr(AutoModelForSequenceClassification._model_mapping, "_extra_content", {})


def _tokenizer(special: list[str], eos: str, pad: str, **more: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["What color is the image? red green blue The answer is"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, **more)


def _without_videos(base: type[ProcessorMixin]) -> type[Any]:
    """A processor of this kind without its video half, which needs torchvision."""

    class ImagesOnly(base):  # type: ignore[misc, valid-type]
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            whole = ProcessorMixin.__init__

            def without_videos(
                self: Any, images: Any, text: Any, videos: Any = None, chat_template: Any = None
            ) -> None:
                self.video_processor = None
                whole(self, images, text, chat_template=chat_template)

            ProcessorMixin.__init__ = without_videos  # type: ignore[method-assign]
            try:
                super().__init__(image_processor, tokenizer, None, chat_template=chat_template)
            finally:
                ProcessorMixin.__init__ = whole  # type: ignore[method-assign]

    ImagesOnly.__name__ = base.__name__
    return ImagesOnly


def _template(placeholder: str) -> str:
    return CHAT_TEMPLATE.replace("PLACEHOLDER", placeholder)


def _qwen(kind: str) -> tuple[PreTrainedModel, Any]:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer([*QWEN_TOKENS, "<|video_pad|>"], "<|im_end|>", "<|endoftext|>")
    is_three = kind == "Qwen3VL"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True} if is_three else {"mrope_section": [1, 1, 2]}
    text = {**TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope, "bos_token_id": None}
    text |= {"eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if is_three:
        text |= {"num_hidden_layers": 3, "head_dim": 8}
        vision |= {"depth": 3, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    else:
        vision |= {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=5,
        video_token_id=6,
        vision_start_token_id=3,
        vision_end_token_id=4,
        tie_word_embeddings=True,
    )
    side = 32 if is_three else 28
    images = Qwen2VLImageProcessorPil(
        size={"shortest_edge": side * side, "longest_edge": side * side * 16}, patch_size=16 if is_three else 14
    )
    processor = _without_videos(getattr(transformers, f"{kind}Processor"))(
        images, tokenizer, _template("<|vision_start|><|image_pad|><|vision_end|>")
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config), processor


def qwen3_vl_mixture() -> tuple[PreTrainedModel, Any]:
    """Qwen3-VL with four experts in each layer, of which two run."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    dense, processor = _qwen("Qwen3VL")
    config = dense.config.to_dict()
    for part in ("text_config", "vision_config"):
        del config[part]["model_type"]
    config["text_config"] |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    ids = {name: value for name, value in config.items() if name.endswith("_token_id") and value is not None}
    parts = {name: config[name] for name in ("text_config", "vision_config")}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**parts, **ids, tie_word_embeddings=True)), processor


def _llava() -> tuple[PreTrainedModel, Any]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    tokenizer = _tokenizer(LLAVA_TOKENS, "<|im_end|>", "<|endoftext|>")
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION, image_size=28, patch_size=14, projection_dim=32),
        text_config=LlamaConfig(**TEXT, vocab_size=len(tokenizer), eos_token_id=2, pad_token_id=0, bos_token_id=None),
        image_token_index=3,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    images = LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_template("<image>"),
    )
    return LlavaForConditionalGeneration(config), processor


def _idefics3() -> tuple[PreTrainedModel, Any]:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = _tokenizer(IDEFICS_TOKENS, "<|im_end|>", "<|endoftext|>")
    text = {**TEXT, "model_type": "llama", "vocab_size": len(tokenizer), "eos_token_id": 2, "pad_token_id": 0}
    config = Idefics3Config(
        text_config=text,
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        image_token_id=4,
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_template("<image>"))
    return Idefics3ForConditionalGeneration(config), processor


def _gemma3() -> tuple[PreTrainedModel, Any]:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    extra = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = _tokenizer(GEMMA_TOKENS, "<|im_end|>", "<pad>", bos_token="<bos>", extra_special_tokens=extra)
    text = {**TEXT, "vocab_size": len(tokenizer), "head_dim": 8, "sliding_window": 24, "eos_token_id": 7}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0, "bos_token_id": 2}
    config = Gemma3Config(
        text_config=text,
        vision_config={**VISION, "image_size": 28, "patch_size": 7},
        mm_tokens_per_image=4,
        boi_token_index=3,
        eoi_token_index=4,
        image_token_index=5,
    )
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=_template("<start_of_image>"))
    return Gemma3ForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[PreTrainedModel, Any]]] = {
    "llava": _llava,
    "idefics3": _idefics3,
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VL"),
    "qwen3_vl": lambda: _qwen("Qwen3VL"),
    "gemma3": _gemma3,
}
