"""Write the tokenizer of a GGUF file as transformers converts it: a process of its own.

python -m engine.checkpoint.gguf_tokenizer FILE FOLDER
"""

import sys
from pathlib import Path

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.checkpoint.gguf_list import read_gguf

# Ways to split a text (`tokenizer.ggml.pre`) that take each digit by itself, and then split as
# GPT-2 does; transformers does not know these, and would take numbers whole.
_DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell")


def convert(file: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into a folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    if read_gguf(file).fields.get("tokenizer.ggml.pre") in _DIGIT_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        as_gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, as_gpt2])
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
