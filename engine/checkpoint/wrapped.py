"""Find the language model in a checkpoint of several modalities (text, pictures, sound).

Such a model is a wrapper around a language model. For text alone it computes what its language
model computes, so only that is loaded: the tensors of the other parts are not read and take no
memory. `families.WRAPPERS` names the wrappers. This file makes the configuration of the language
model, and finds its tensors in the files, where their names have a prefix. Reads no tensor.
"""

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from transformers import CONFIG_MAPPING

from engine.checkpoint.families import text_kind
from engine.checkpoint.files import Object, Shapes, Stored, parts
from engine.checkpoint.stated_text import HEAD

# Fields about positions in pictures, which the language model alone does not have.
_OF_PICTURES = ("mrope_section", "mrope_interleaved")


def language_model(config: Any, stated: Object, names: Iterable[str]) -> Any:
    """Return the configuration of a wrapper's language model.

    config  transformers' configuration made of config.json, whose content is `stated`
    names   names of the language model's tensors
    """
    text = deepcopy(config.get_text_config(decoder=True))
    kind = text_kind(config.model_type, text.to_dict())
    if text.model_type != kind:
        fields = {field: value for field, value in text.to_dict().items() if field != "model_type"}
        rope = fields.get("rope_parameters") or {}
        fields["rope_parameters"] = {k: v for k, v in rope.items() if k not in _OF_PICTURES}
        if kind == "qwen3_moe":
            fields["norm_topk_prob"] = True  # the wrapper always does that
        text = CONFIG_MAPPING[kind](**fields)
    text.dtype = config.dtype or text.dtype
    if config.model_type != "llama4":  # it leaves this to its language model
        own = getattr(text, "tie_word_embeddings", False)
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", own)
    if f"{HEAD}weight" in names and not any("tie_word_embeddings" in p for p in parts(stated)):
        text.tie_word_embeddings = False
    return text


def as_in_model(stored: dict[str, Stored], shapes: Shapes, model: Any) -> dict[str, Stored]:
    """Return `stored` with `is_swapped` set for tensors that the files hold transposed.

    Qwen3-VL's experts are stored so.

    shapes  shape in the files, by the model's name
    model   the language model, on `meta` (without memory)
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def is_swapped(name: str) -> bool:
        shape, want = shapes[name], wanted.get(name, ())
        return len(shape) == len(want) == 3 and shape != want == (shape[0], shape[2], shape[1])

    return {name: Stored(one.name, is_swapped(name)) for name, one in stored.items()}
