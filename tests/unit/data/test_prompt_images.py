"""What servers get of the images of a prompt."""

from __future__ import annotations

import io
from typing import Any

import datasets
import pytest
from PIL import Image

from prefrl.data.images import ImageReader
from prefrl.data.tokenize import prepare_prompt_dataset
from tests.vlms import image, tiny_vlm


def prepared(processor: Any, images: list[Any], **options: Any) -> dict[str, Any]:
    dataset = datasets.Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": "What color is it?"}]], "images": [images]},
        features=datasets.Features(
            prompt=datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
            images=datasets.List(datasets.Image()),
        ),
    )
    row: dict[str, Any] = prepare_prompt_dataset(dataset, processor, **{"max_prompt_length": None} | options)[0]
    return row


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_unexpanded_ids_are_those_of_the_text_with_one_placeholder_for_each_image(family: str) -> None:
    _, processor = tiny_vlm(family)
    row = prepared(processor, [image(seed=1), image(size=(30, 90), seed=2)])
    text = processor.tokenizer.decode(row["unexpanded_ids"])
    token = processor.image_token
    assert text == f"<|im_start|>user\n{token}{token}What color is it?<|im_end|>\n<|im_start|>assistant\n"
    assert len(row["prompt_ids"]) > len(row["unexpanded_ids"])
    assert prepared(processor, [])["unexpanded_ids"] == []


def test_what_is_cut_off_the_end_of_a_prompt_is_cut_off_both() -> None:
    _, processor = tiny_vlm("idefics3")
    whole = prepared(processor, [image(seed=1)])
    cut = prepared(processor, [image(seed=1)], max_prompt_length=len(whole["prompt_ids"]) - 3, truncation="right")
    assert (cut["prompt_ids"], cut["unexpanded_ids"]) == (whole["prompt_ids"][:-3], whole["unexpanded_ids"][:-3])


def test_pictures_are_in_rgb_and_white_where_they_were_transparent() -> None:
    _, processor = tiny_vlm("idefics3")
    half = Image.new("RGBA", (40, 40), (200, 0, 0, 255))
    half.paste((0, 0, 0, 0), (0, 0, 20, 40))
    palette = half.convert("P")
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=palette.getpixel((0, 0)))
    gray = Image.new("L", (40, 40), 7)
    row = prepared(processor, [half, {"bytes": file.getvalue(), "path": None}, gray])
    images = ImageReader(processor).of_prompt(row)
    assert images is not None
    assert images.unexpanded_ids == tuple(row["unexpanded_ids"])
    assert [picture.mode for picture in images.pictures] == ["RGB"] * 3
    pixels = [[picture.getpixel((x, 10)) for x in (10, 30)] for picture in images.pictures]
    assert pixels[0] == [(255, 255, 255), (200, 0, 0)]
    assert pixels[1][0] == (255, 255, 255)
    assert pixels[2] == [(7, 7, 7)] * 2
