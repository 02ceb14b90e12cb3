"""Images in conversations: where they stand in messages, and the pixels of an image as it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefrl.errors import DataError

# Columns that hold images, one or a list of them.
IMAGE_COLUMNS = ("images", "image")


def images_of(row: Mapping[str, Any], column: str) -> list[Any]:
    """The images of a row as they are stored, in order: those of its image column, or those in its messages.

    Args:
        row: A row of a dataset.
        column: The column with the messages that may hold images.
    """
    for name in IMAGE_COLUMNS:
        value = row.get(name)
        if value is not None:
            return list(value) if isinstance(value, list | tuple) else [value]
    blocks = [block for message in row.get(column) or () for block in _blocks_of(message)]
    return [block["image"] for block in blocks if block.get("image") is not None]


def with_placeholders(messages: Sequence[dict[str, Any]], num_images: int, column: str) -> list[dict[str, Any]]:
    """Messages with a block `{"type": "image"}` for each image.

    If there are none, they are put at the beginning of the first message of the user.

    Raises:
        DataError: Numbers of blocks and of images differ, or no message is the user's.
    """
    bare = [_without_pixels(message) for message in messages]
    num_blocks = sum(len(list(_blocks_of(message))) for message in bare)
    if num_blocks == num_images:
        return bare
    if num_blocks:
        raise DataError(
            f"column {column!r} has {num_blocks} blocks of type 'image' for {num_images} images: must be one for "
            "each image, or none"
        )
    users = [turn for turn, message in enumerate(bare) if message["role"] == "user"]
    if not users:
        raise DataError(
            f"column {column!r} has no message with role 'user', in which {num_images} images could stand. Give "
            'the images their places: {"role": ..., "content": [{"type": "image"}, ...]}'
        )
    first = bare[users[0]]
    placed = {**first, "content": [*[{"type": "image"}] * num_images, *_as_blocks(first["content"])]}
    return [*bare[: users[0]], placed, *bare[users[0] + 1 :]]


def opened(image: Any) -> Any:
    """The image of a cell in RGB: as it is, or read from a file or from bytes.

    Raises:
        DataError: It cannot be read.
    """
    if isinstance(image, str):
        image = {"path": image, "bytes": None}
    if not isinstance(image, dict):
        return in_rgb(image)
    import datasets  # slow, and most rewards never need it

    try:
        return in_rgb(datasets.Image().decode_example({"path": image.get("path"), "bytes": image.get("bytes")}))
    except Exception as error:
        raise DataError(
            f"an image cannot be read: {type(error).__name__}: {error}. Give PIL images, paths of files, or "
            '{"bytes": ...}'
        ) from error


def in_rgb(image: Any) -> Any:
    """A PIL image in RGB, over white where it is transparent; processors differ in what they make of other images."""
    if getattr(image, "mode", "RGB") == "RGB":
        return image
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    opaque = image.convert("RGB")
    opaque.paste((255, 255, 255), mask=image.getchannel("A").point(lambda alpha: 255 - alpha))
    return opaque


def in_blocks(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of blocks, as templates of vision-language models expect it."""
    return {**message, "content": _as_blocks(message["content"])} if "content" in message else message


def has_images(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether some message has a block of type image."""
    return any(True for message in messages for _ in _blocks_of(message))


def _as_blocks(content: Any) -> list[dict[str, Any]]:
    """The content of a message as a list of blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())


def _blocks_of(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    content = message.get("content")
    for block in content if isinstance(content, list) else ():
        if isinstance(block, Mapping) and block.get("type") == "image":
            yield block


def _without_pixels(message: dict[str, Any]) -> dict[str, Any]:
    """The message with placeholders for its images."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {
        **message,
        "content": [{"type": "image"} if block in list(_blocks_of(message)) else block for block in content],
    }
