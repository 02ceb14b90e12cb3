"""A student to distill into: the first layers of a model. python examples/first_layers.py MODEL LAYERS FOLDER.

The layers that are left out have come to nothing yet: what the student says makes no sense before it is trained.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer


def main(model: str, layers: str, folder: str) -> None:
    """Write the first layers, the embeddings, the head and the tokenizer of a model into a folder."""
    student = AutoModelForCausalLM.from_pretrained(model)
    config, count = student.config, int(layers)
    student.model.layers = student.model.layers[:count]
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]
    student.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
