"""Llama 4's attention temperatures follow the positions that a pass is given."""

from pathlib import Path

import torch
from transformers import DynamicCache

from engine.forward.temperatures import follow_positions
from tests.families import PROMPTS, load, make_family


def test_a_row_has_the_temperature_of_its_position(tmp_path: Path) -> None:
    model = load(make_family("llama4_text", tmp_path), attention_chunk_size=256)
    ids = torch.tensor([[*PROMPTS[1], *PROMPTS[2]]])
    with torch.inference_mode():
        plain = model(ids, use_cache=False).logits
        follow_positions(model)
        follow_positions(model)  # the second time changes nothing
        assert torch.equal(model(ids, use_cache=False).logits, plain)
        last = ids.shape[1] - 1
        cache = DynamicCache()
        model(ids[:, :last], past_key_values=cache, use_cache=True)
        # Two rows beside each other, each of which follows the same prompt.
        mask = torch.zeros(1, 1, 2, last + 2)
        mask[0, 0, 0, -1] = mask[0, 0, 1, -2] = torch.finfo(mask.dtype).min
        made = model(
            ids[:, [last, last]],
            attention_mask={"full_attention": mask, "chunked_attention": mask},
            position_ids=torch.tensor([[last, last]]),
            past_key_values=cache,
            use_cache=True,
        ).logits
    assert (made - plain[:, -1:]).abs().max() < 1e-4 * plain.abs().max()
