"""`python -m lab.measure.row_costs [FAMILY ...]`: what passes of several rows cost in families
with running states, beside dense models of the same size.

Each model has some 60 million random parameters in float32. CPU time of one thread is counted, so
that other programs disturb less; a row of the table has the median milliseconds of passes of 1, 5
and 9 rows (two branches of drafts) behind a text of 300 tokens.
"""

import argparse
import gc
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as hf
from transformers import CONFIG_MAPPING

from engine.checkpoint.model import load_model
from engine.layout.slots import SlotMap
from engine.loading import make_executor
from engine.model_executor import ModelExecutor

ROWS = (1, 5, 9)
LENGTH, NUM_RUNS, NUM_WARM, VOCAB = 300, 32, 4, 8192
_NUM_LAYERS = 16
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "num_hidden_layers": _NUM_LAYERS,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_TYPES = [*["linear_attention"] * 3, "full_attention"] * 4
_DELTA_RULE: Mapping[str, Any] = {
    "layer_types": _TYPES,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 8),
}
# Family -> what its configuration has besides the sizes.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "olmo2": {},
    "lfm2": {
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 4,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_5_text": {**_DELTA_RULE, "head_dim": 64},
    "kimi_linear": {
        "layer_types": _TYPES,
        "mlp_layer_types": ["dense"] * _NUM_LAYERS,
        **dict.fromkeys(("linear_num_heads", "num_key_value_heads"), 8),
        **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 32),
        **dict.fromkeys(("linear_head_dim", "v_head_dim"), 64),
        "kv_lora_rank": 128,
        "model_max_length": 2048,
    },
    "minimax": {"layer_types": _TYPES, "num_local_experts": 1, "num_experts_per_tok": 1},
    "bamba": {
        "attn_layer_indices": [3, 7, 11, 15],
        "mamba_n_heads": 16,
        **dict.fromkeys(("mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 64),
        "mamba_n_groups": 1,
    },
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 3,
        "mamba_dt_rank": 32,
        **dict.fromkeys(("num_experts", "num_experts_per_tok"), 1),
    },
    "recurrent_gemma": {
        "lru_width": 512,
        "intermediate_size": 3072,
        "head_dim": 64,
        "attention_window_size": 1024,
    },
}


def random_model(kind: str, num_layers: int = _NUM_LAYERS) -> Any:
    """Return a random model of a family, of the first `num_layers` of its layers."""
    known = {*CONFIG_MAPPING[kind]().to_dict(), *CONFIG_MAPPING[kind].attribute_map}
    fields = {name: value for name, value in _SIZES.items() if name in known}
    fields |= dict(FAMILIES.get(kind, {})) | {"num_hidden_layers": num_layers}
    for name in ("layer_types", "mlp_layer_types"):
        if name in fields:
            fields[name] = fields[name][:num_layers]
    if "attn_layer_indices" in fields:
        fields["attn_layer_indices"] = [i for i in fields["attn_layer_indices"] if i < num_layers]
    torch.manual_seed(0)
    of_kind: Any = hf.AutoModelForCausalLM
    return of_kind.from_config(CONFIG_MAPPING[kind](**fields)).float().eval()


def make(kind: str, folder: str) -> ModelExecutor:
    """Return an executor of a random model of a family, whose files go into `folder`."""
    random_model(kind).save_pretrained(folder)
    return make_executor(load_model(folder, dtype="float32"), 1024, num_lanes=1)


def milliseconds(executor: ModelExecutor, num_rows: int, text: list[int], slots: Any) -> float:
    """Return the median CPU time of passes that read the last token of `text` and drafts."""
    found = []
    for run in range(NUM_WARM + NUM_RUNS):
        nodes: list[tuple[Any, Any, int, int]] = []
        above: Any = None
        position = len(text)
        for number in range(num_rows - 1):
            if number == (num_rows - 1) // 2:  # the second branch
                above, position = None, len(text)
            nodes.append(((run, number), above, number, position))
            above, position = (run, number), position + 1
        feed = slots.feed(text[-1:], nodes)
        before = time.process_time()
        executor.run(feed, tuple(range(num_rows)))
        found.append(time.process_time() - before)
        slots.truncate(len(text) - 1)
    return 1e3 * median(found[NUM_WARM:])


def write(line: str) -> None:
    """Write a line of the table at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    torch.set_num_threads(1)
    write(f"| family | millions | {' | '.join(f'{rows} rows, ms' for rows in ROWS)} | 5 : 1 |")
    write("|---|---|---|---|---|---|")
    for kind in parser.parse_args().families or FAMILIES:
        with TemporaryDirectory() as folder:
            executor = make(kind, str(Path(folder)))
        slots: SlotMap[Any] = SlotMap(executor.capacity, lane=0, windows=executor.windows)
        text = torch.randint(VOCAB, (LENGTH + 1,)).tolist()
        while chunk := slots.next_chunk(text, LENGTH, 256):
            executor.run(slots.feed_prefix(chunk), (len(chunk) - 1,))
        times = [milliseconds(executor, rows, text, slots) for rows in ROWS]
        cells = [f"{time:.1f}" for time in times]
        millions = executor.loaded.num_parameters / 1e6
        write(f"| {kind} | {millions:.0f} | {' | '.join(cells)} | {times[1] / times[0]:.2f} |")
        del executor
        gc.collect()


if __name__ == "__main__":
    main()
