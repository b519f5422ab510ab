"""Write the tokenizer of a GGUF file as transformers converts it: a process of its own.

python -m engine.checkpoint.gguf_tokenizer FILE FOLDER
"""

import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast


def convert(file: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into a folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
