"""A real pair whose tokenizers are stated in several files: prompts and texts are transformers'."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

from coordinator import LLM, SamplingParams
from coordinator.api.config import SpeculationConfig
from coordinator.text.metrics import Metrics
from proto.errors import ConfigurationError
from tests.tiny_models import make_model
from tests.tiny_tokenizer import VOCAB_SIZE, padding_to, save_bytewise_tokenizer, truncation_to

pytestmark = pytest.mark.process

TOOL, PAD = "<|tool|>", "<|pad|>"
# The model has a row for TOOL, and none for PAD.
NUM_IDS = VOCAB_SIZE + 1
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": TOOL, "image_token": PAD}
TRUNCATION, PADDING = truncation_to(8), padding_to(64, "<|end|>")
PROMPT = f"Say {TOOL} <|end|> and then some more"
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
LACKS = rf"and the prompt has {NUM_IDS} \('<\|pad\|>', which the tokenizer has and the model lacks"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model("llama", tmp_path_factory.mktemp("target"), vocab=NUM_IDS)
    save_bytewise_tokenizer(folder)
    path = folder / "tokenizer.json"
    stated = json.loads(path.read_text()) | {"truncation": TRUNCATION, "padding": PADDING}
    path.write_text(json.dumps(stated))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def llm(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The drafter's folder lacks the file that states the further tokens."""
    drafter = make_model("llama", tmp_path_factory.mktemp("drafter"), vocab=NUM_IDS)
    save_bytewise_tokenizer(drafter)
    with LLM(str(target), speculative_config={"model": str(drafter)}, dtype="float32") as made:
        yield made


def written(
    llm: LLM, speculation: SpeculationConfig, prompt: str = PROMPT
) -> tuple[list[int], Metrics]:
    """The text that is written with these settings, and what was measured."""
    stream, _ = llm.pair.generate(llm.pair.encode(prompt), speculation, GREEDY)
    tokens = [token for chunk in stream for token in chunk.tokens]
    assert stream.result is not None
    assert stream.result.metrics is not None
    return tokens, stream.result.metrics


def test_prompts_and_texts_are_those_of_transformers(llm: LLM, target: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(target)
    model = hf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = tokenizer(PROMPT)["input_ids"]
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([ids]), max_new_tokens=30, do_sample=False, eos_token_id=None
        )
    answer = whole[0, len(ids) :].tolist()
    (output,) = llm.generate(PROMPT, GREEDY)
    assert output.prompt_token_ids == ids
    assert output.outputs[0].token_ids == answer
    assert output.outputs[0].text == tokenizer.decode(answer, skip_special_tokens=True)


def test_a_drafter_with_the_same_tokenizer_json_drafts_without_a_translation(llm: LLM) -> None:
    assert not llm.pair.drafts_in_other_words
    sync = SpeculationConfig(policy="sync", num_speculative_tokens=2, adaptive=False)
    made, metrics = written(llm, sync)
    assert made == llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    assert metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("prompt", [f"a {PAD} b", [1, NUM_IDS]])
def test_a_token_that_the_model_lacks_is_refused_by_its_name(
    llm: LLM, prompt: str | list[int]
) -> None:
    with pytest.raises(ConfigurationError, match=LACKS):
        llm.generate(prompt, GREEDY)


def test_so_it_is_in_a_conversation(llm: LLM) -> None:
    with pytest.raises(ConfigurationError, match=LACKS):
        llm.chat([{"role": "user", "content": PAD}], GREEDY)


def test_a_reference_with_such_a_token_ends_no_target(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "reference.txt"
    path.write_text(f"and then {PAD} some more {PAD}")
    copying = SpeculationConfig(policy="sync", also_ngram=True, ngram_min=1, reference=str(path))
    made, _ = written(llm, copying, prompt="and then")
    alone, _ = written(llm, SpeculationConfig(policy="ar"), prompt="and then")
    assert made == alone
