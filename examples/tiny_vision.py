"""A tiny model with random weights that reads images, and its processor."""

import torch
from tiny import SPECIAL, tiny_model, tiny_tokenizer
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% for block in m.content %}"
    "{{ '<image>' if block.type == 'image' else block.text }} {% endfor %}<end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_vision_model(words: list[str]) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A model of about that size that also reads images, as four tokens each; and its processor."""
    tokenizer = tiny_tokenizer(["<image>", *words])
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL[2:], "<image>"]})
    text = tiny_model(tokenizer).config.to_dict() | {"model_type": "qwen2"}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    placeholder = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=placeholder,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    processor = LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    model = LlavaForConditionalGeneration(config)
    for weight in model.parameters():
        if weight.dim() > 1:  # larger than usual, so that images differ clearly
            torch.nn.init.normal_(weight, std=0.2)
    return model, processor
