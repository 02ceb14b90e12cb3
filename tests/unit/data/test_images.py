"""Images of dataset rows: their places, their tokens, and what reaches a batch."""

from __future__ import annotations

import io
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

from prefrl.data.collate import batch_of, parts_of_batch, preference_batch, reward_batch, sft_batch, unpaired_batch
from prefrl.data.images import ImageReader, file_bytes, with_named_images
from prefrl.data.packing import pack_prepared
from prefrl.data.preference import prepare_preference_dataset, prepare_reward_dataset, prepare_unpaired_dataset
from prefrl.data.tokenize import prepare_prompt_dataset, prepare_sft_dataset
from prefrl.errors import ConfigError, DataError
from prefrl.types import TokenBatch
from tests.assets import tiny_tokenizer
from tests.vlms import image, tiny_vlm

USER = {"role": "user", "content": "What color?"}
RED = {"role": "assistant", "content": "red"}
BLUE = {"role": "assistant", "content": "blue"}
IMAGE = {"type": "image"}
OPTIONS = {"max_length": None, "truncation": "right", "invalid_rows": "error"}
PLACEHOLDER = {"llava": 3, "gemma3": 5, "idefics3": 4}


@pytest.fixture(scope="module")
def llava():
    return tiny_vlm("llava")[1]


def in_blocks(message):
    return {**message, "content": [text(message["content"])]}


def text(content):
    return {"type": "text", "text": content}


def rows(*values):
    return datasets.Dataset.from_list(list(values))


def prompt_ids(processor, row):
    (prepared,) = prepare_prompt_dataset(rows(row), processor, max_prompt_length=None)
    return prepared["prompt_ids"]


def decoded(processor, ids):
    return processor.tokenizer.decode(ids)


def test_images_without_places_stand_at_the_beginning_of_the_users_first_message(llava):
    ids = prompt_ids(
        llava, {"prompt": [{"role": "system", "content": "Be brief."}, USER], "images": [image(), image()]}
    )
    opening = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert decoded(llava, ids).startswith(opening + "<image>" * 8 + "What color?")


def test_images_stand_where_the_messages_say(llava):
    content = [text("First "), IMAGE, text(" then "), IMAGE]
    ids = prompt_ids(llava, {"prompt": [{"role": "user", "content": content}], "images": [image(), image()]})
    assert "First " + "<image>" * 4 + " then " + "<image>" * 4 + "<|im_end|>" in decoded(llava, ids)


@pytest.mark.parametrize("form", ["column image", "column images", "blocks", "bytes", "path"])
def test_all_forms_of_a_row_give_the_same_tokens_and_pixels(llava, form, tmp_path):
    picture = image()
    picture.save(tmp_path / "picture.png")
    data = io.BytesIO()
    picture.save(data, "png")
    row = {
        "column image": {"prompt": [USER], "image": picture},
        "column images": {"prompt": [USER], "images": [picture]},
        "blocks": {
            "prompt": [
                {"role": "user", "content": [{**IMAGE, "image": {"bytes": data.getvalue()}}, text("What color?")]}
            ]
        },
        "bytes": {"prompt": [USER], "images": [{"bytes": data.getvalue()}]},
        "path": {"prompt": [USER], "images": [str(tmp_path / "picture.png")]},
    }[form]
    (prepared,) = prepare_prompt_dataset(rows(row), llava, max_prompt_length=None)
    images = ImageReader(llava).of_prompt(prepared)
    start = prepared["prompt_ids"].index(3)
    assert images.runs == ((start, start + 4),)
    expected = llava(text=["<image>"], images=[picture], return_tensors="pt")["pixel_values"]
    assert torch.equal(images.inputs["pixel_values"], expected)
    assert set(images.inputs) == {"pixel_values"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": [{"role": "user", "content": [IMAGE, text("?")]}], "images": [image(), image()]},
            "1 blocks of type 'image' for 2 images",
        ),
        ({"prompt": [{"role": "system", "content": "?"}], "images": [image()]}, "no message with role 'user'"),
        ({"prompt": [USER], "images": ["missing.png"]}, "an image cannot be read: FileNotFoundError"),
        ({"prompt": [USER], "images": [{"bytes": b"no image"}]}, "an image cannot be read: UnidentifiedImageError"),
    ],
)
def test_rows_that_cannot_be_read_say_why(llava, row, message):
    with pytest.raises(DataError, match=message):
        prompt_ids(llava, row)


def test_images_belong_to_conversations(llava):
    with pytest.raises(
        DataError, match="column 'images' holds images, which belong in messages, but the dataset holds text"
    ):
        prompt_ids(llava, {"prompt": "What color?", "images": [image()]})


def test_a_tokenizer_refuses_columns_and_blocks_of_images():
    with pytest.raises(
        DataError, match="column 'image' holds images, but processing_class is a tokenizer, which reads text only"
    ):
        prompt_ids(tiny_tokenizer(), {"prompt": [USER], "image": "any image"})
    with pytest.raises(DataError, match="column 'prompt' holds images: the model reads text only"):
        prompt_ids(tiny_tokenizer(), {"prompt": [{"role": "user", "content": [IMAGE, text("?")]}]})


def test_a_column_of_another_name_holds_the_images():
    dataset = rows({"prompt": [USER], "photo": image()})
    assert with_named_images(dataset, "photo").column_names == ["prompt", "images"]
    assert with_named_images(dataset, None) is dataset
    with pytest.raises(
        DataError, match=r"image_key='photos': the dataset has no such column, only \['prompt', 'photo'\]"
    ):
        with_named_images(dataset, "photos")
    with pytest.raises(DataError, match="image_key='photo': the dataset also has a column 'images'"):
        with_named_images(rows({"photo": image(), "images": [image()]}), "photo")


def test_two_columns_of_images_are_one_too_many(llava):
    with pytest.raises(DataError, match=r"columns \['images', 'image'\]"):
        prompt_ids(llava, {"prompt": [USER], "image": image(), "images": [image()]})


def test_completions_hold_no_images(llava):
    row = {"prompt": [USER], "completion": [{"role": "assistant", "content": [IMAGE]}], "images": [image()]}
    with pytest.raises(DataError, match="column 'completion' holds images: they are allowed in column 'prompt'"):
        prepare_sft_dataset(rows(row), llava, **OPTIONS)


def test_prompts_with_images_are_never_truncated(llava):
    row = {"prompt": [USER], "images": [image()]}
    length = len(prompt_ids(llava, row))
    kept = {"max_prompt_length": length - 1}
    with pytest.raises(DataError, match=f"has {length} tokens, more than the {length - 1} allowed, and images"):
        prepare_prompt_dataset(rows(row), llava, **kept)
    both = rows(row, {"prompt": [{"role": "user", "content": "?"}], "images": []})
    assert len(prepare_prompt_dataset(both, llava, filter_overlong=True, **kept)) == 1


def test_sft_rows_lose_only_tokens_behind_their_images(llava):
    row = {"prompt": [USER], "completion": [{"role": "assistant", "content": "red " * 60}], "images": [image()]}
    (prepared,) = prepare_sft_dataset(rows(row), llava, **{**OPTIONS, "max_length": 60})
    assert len(prepared["input_ids"]) == 60
    with pytest.raises(DataError, match="images, which are never cut off"):
        prepare_sft_dataset(rows(row), llava, **{**OPTIONS, "max_length": 60, "truncation": "left"})


def test_preference_prompts_with_images_are_not_cut(llava):
    row = {"prompt": [USER], "chosen": [RED], "rejected": [BLUE], "images": [image()]}
    with pytest.raises(DataError, match="a prompt with images, which is never truncated"):
        prepare_preference_dataset(rows(row), llava, **{**OPTIONS, "max_length": 22, "truncation": "left"})


@pytest.mark.parametrize("family", ["llava", "idefics3", "gemma3"])
def test_tokens_of_images_have_no_loss_and_others_do(family):
    processor = tiny_vlm(family)[1]
    row = {
        "messages": [{"role": "user", "content": [text("See "), IMAGE, text(" now")]}, in_blocks(RED)],
        "images": [image()],
    }
    (prepared,) = prepare_sft_dataset(rows(row), processor, **OPTIONS)
    pairs = list(zip(prepared["input_ids"], prepared["trainable"], strict=True))
    assert not any(flag for token, flag in pairs if token == PLACEHOLDER[family])
    learned = decoded(processor, [token for token, flag in pairs if flag])
    assert learned.startswith("user\nSee ")
    assert learned.rstrip().endswith(" now<|im_end|>\n<|im_start|>assistant\nred<|im_end|>")


def test_only_the_assistants_turns_are_learned_around_images(llava):
    row = {
        "messages": [
            *map(in_blocks, (USER, RED)),
            {"role": "user", "content": [IMAGE, text("And?")]},
            in_blocks(BLUE),
        ],
        "images": [image()],
    }
    (prepared,) = prepare_sft_dataset(rows(row), llava, assistant_only_loss=True, **OPTIONS)
    learned = [token for token, flag in zip(prepared["input_ids"], prepared["trainable"], strict=True) if flag]
    assert decoded(llava, learned) == "red<|im_end|>blue<|im_end|>"


def attached(processor, dataset):
    return [ImageReader(processor).attach(row) for row in dataset]


def test_an_sft_batch_has_the_images_of_its_rows(llava):
    user, red, blue = map(in_blocks, (USER, RED, BLUE))
    conversation = {"messages": [user, red], "images": [image(seed=1)]}
    plain = {"messages": [user, blue], "images": []}
    late = {"messages": [user, red, {"role": "user", "content": [IMAGE]}, blue], "images": [image(seed=2)]}
    dataset = prepare_sft_dataset(rows(conversation, plain, late), llava, **OPTIONS)
    batch = sft_batch(attached(llava, dataset))
    assert [one is not None for one in batch.images] == [True, False, True]
    for row, one in enumerate(batch.images):
        ids = torch.cat([batch.select([row]).prompt_ids, batch.select([row]).response_ids]).tolist()
        runs = () if one is None else one.runs
        assert [ids[start:stop] for start, stop in runs] == [[3] * 4 for _ in runs]
        assert ids.count(3) == 4 * len(runs)


def test_packed_rows_keep_the_images_of_each_sequence(llava):
    ones = [{"messages": [USER, RED], "images": [image(seed=1)]}, {"messages": [USER, BLUE], "images": []}]
    dataset = prepare_sft_dataset(rows(*ones, *ones), llava, **OPTIONS)
    packed = pack_prepared(dataset, max_length=120)
    assert len(packed) < 4
    apart, together = sft_batch(attached(llava, dataset)), sft_batch(attached(llava, packed))
    assert sorted(one is not None for one in together.images) == sorted(one is not None for one in apart.images)
    for row, one in enumerate(together.images):
        assert together.select([row]).prompt_ids.tolist().count(3) + together.select(
            [row]
        ).response_ids.tolist().count(3) == (4 if one is not None else 0)
    with pytest.raises(ConfigError, match="packing_strategy='wrapped' may cut sequences anywhere"):
        pack_prepared(dataset, max_length=120, strategy="wrapped")


def test_both_sides_of_a_pair_share_the_images_of_their_prompt(llava):
    row = {"prompt": [USER], "chosen": [RED], "rejected": [BLUE], "images": [image()]}
    pair = {"chosen": [USER, RED], "rejected": [USER, BLUE], "images": [image()]}
    for one in (row, pair):
        batch = preference_batch(attached(llava, prepare_preference_dataset(rows(one), llava, **OPTIONS)))
        assert (batch.num_prompts, len(batch.images), batch.images[0].runs) == (1, 1, ((5, 9),))
    dataset = prepare_reward_dataset(rows(row), llava, max_length=None, invalid_rows="error")
    batch = reward_batch(attached(llava, dataset), padding_id=0)
    assert batch.images[0].runs == ((5, 9),)


def test_a_kl_completion_follows_the_images_of_its_own_prompt(llava):
    ones = [
        {"prompt": [USER], "completion": [c], "label": c is RED, "images": [image(seed=i)]}
        for i, c in enumerate((RED, BLUE))
    ]
    dataset = prepare_unpaired_dataset(rows(*ones), llava, with_mismatched=True, **OPTIONS)
    batch = unpaired_batch(attached(llava, dataset))
    assert batch.num_prompts == 2  # prompts of equal tokens, which differ by their images
    pixels = [one.inputs["pixel_values"] for one in batch.images]
    assert not torch.equal(*pixels)


def test_a_batch_with_images_is_the_same_once_it_was_written(llava):
    row = {"prompt": [USER], "chosen": [RED], "rejected": [BLUE], "images": [image()]}
    plain = {**row, "images": []}
    batch = preference_batch(attached(llava, prepare_preference_dataset(rows(row, plain), llava, **OPTIONS)))
    tensors, host = parts_of_batch(batch, "x.")
    again = batch_of(type(batch), host, tensors, "x.")
    assert again.images[1] is None
    assert again.images[0].runs == batch.images[0].runs
    assert torch.equal(again.images[0].inputs["pixel_values"], batch.images[0].inputs["pixel_values"])
    assert isinstance(batch_of(type(batch), *reversed(parts_of_batch(batch.select([2, 3]), "")), ""), TokenBatch)


def test_an_image_as_the_bytes_of_a_file(tmp_path):
    picture = image()
    picture.save(tmp_path / "a.png")
    for form in (picture, {"bytes": None, "path": str(tmp_path / "a.png")}, str(tmp_path / "a.png")):
        assert (
            datasets.Image().decode_example({"bytes": file_bytes(form), "path": None}).tobytes() == picture.tobytes()
        )


def test_an_image_that_was_read_from_a_jpeg_is_written_without_loss():
    file = io.BytesIO()
    Image.effect_noise((16, 16), 60).convert("RGB").save(file, format="JPEG", quality=20)
    picture = Image.open(io.BytesIO(file.getvalue()))
    assert picture.format == "JPEG"
    again = datasets.Image().decode_example({"bytes": file_bytes(picture), "path": None})
    assert again.tobytes() == picture.tobytes()


@pytest.mark.parametrize("prepare", [prepare_preference_dataset, prepare_reward_dataset])
def test_images_after_the_first_difference_of_a_pair_are_refused(prepare, llava):
    options = OPTIONS if prepare is prepare_preference_dataset else {"max_length": None, "invalid_rows": "error"}
    turns = {"role": "user", "content": [IMAGE, text("And this?")]}
    pair = {"chosen": [USER, RED, turns, BLUE], "rejected": [USER, BLUE, turns, BLUE]}
    data = rows({side: [in_blocks(m) if isinstance(m["content"], str) else m for m in pair[side]] for side in pair})
    data = data.add_column("images", [[{"bytes": file_bytes(image()), "path": None}]])
    with pytest.raises(DataError, match="differ before the end of their last image"):
        prepare(data, llava, **options)


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
