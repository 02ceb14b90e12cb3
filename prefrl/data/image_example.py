"""Rows with images that the self-check of a vision-language model reads."""

from __future__ import annotations

from prefrl.data.collate import flat_batch
from prefrl.data.images import ImageReader, tokenizer_of
from prefrl.errors import require
from prefrl.types import TokenBatch


def example_batch(reader: ImageReader) -> TokenBatch:
    """A few short rows with and without images; always the same."""
    picture = require("PIL.Image", extra="images", feature="a vision-language model")
    gradient = picture.linear_gradient("L").convert("RGB")
    pictures = [gradient.resize((56, 84)), gradient.rotate(90).resize((84, 56))]
    token, tokenizer = reader.processor.image_token, tokenizer_of(reader.processor)
    texts = {f"First {token} then {token} compare": pictures, f"{token} color?": pictures[1:], "No image here": []}
    answers = (("The first is red", "Both are blue and green"), ("It is green",), ("What is it",))
    prompts, responses, groups, images = [], [], [], {}
    for group, (text, own) in enumerate(texts.items()):
        ids = reader.expand(text, own).token_ids if own else tokenizer(text, add_special_tokens=False)["input_ids"]
        if own:
            images[group] = reader.read(own, ids)
        for answer in answers[group]:
            prompts.append(list(ids))
            responses.append(list(tokenizer(answer, add_special_tokens=False)["input_ids"]))
            groups.append(group)
    return flat_batch(prompts, responses, groups=groups, images=images)
