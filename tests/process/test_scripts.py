"""Scripts as people write them for vLLM, with another import and other models: they run."""

import contextlib
import io
import re
from textwrap import dedent
from typing import Any

import pytest

from coordinator.api.models.heads import find_config
from proto.installation import MODELS

pytestmark = pytest.mark.process

TARGET, DRAFTER = str(MODELS / "target"), str(MODELS / "drafter")
HEADS = [
    pytest.param(
        kind, id=kind, marks=[] if find_config(str(MODELS / kind), None) else pytest.mark.skip
    )
    for kind in ("eagle3", "eagle", "medusa")
]

OFFLINE = f"""
    from slipstream import LLM, SamplingParams

    prompts = ["def add(a, b):", "import os", "class Queue:", "for line in lines:"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, top_k=-1, seed=3, max_tokens=16)

    llm = LLM(
        model={TARGET!r},
        tensor_parallel_size=1,
        dtype="float32",
        SPECULATION,
    )
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {{prompt!r}}, Generated text: {{generated_text!r}}")
    """
# Not a script of theirs: what it is compared with.
ALONE = """
    params = sampling_params.model_copy(update={"speculate": False})
    alone = llm.generate(prompts, params)
    """


def ran(script: str) -> tuple[str, dict[str, Any]]:
    """What a script prints, and its variables. Its nodes are ended."""
    names: dict[str, Any] = {"__name__": "__main__"}
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(dedent(script), "script.py", "exec"), names)
    finally:
        if "llm" in names:
            names["llm"].close()
    return out.getvalue(), names


def with_speculation(config: dict[str, Any]) -> str:
    """The usual script with this speculative_config."""
    return OFFLINE.replace("SPECULATION", f"speculative_config={config!r}")


def texts_of(printed: str) -> list[str]:
    """The generated texts."""
    found = re.findall(r"^Prompt: (.*), Generated text: (.*)$", printed, re.MULTILINE)
    assert [prompt for prompt, _ in found][1] == "'import os'"
    return [text for _, text in found]


def drafted(config: dict[str, Any]) -> tuple[list[str], list[str], dict[str, int]]:
    """Texts with this configuration, those of the target alone, and accepted drafts by source."""
    printed, names = ran(with_speculation(config) + ALONE)
    found: dict[str, int] = {}
    for output in names["outputs"]:
        for source, number in output.outputs[0].metrics.accepted_by_source.items():
            found[source] = found.get(source, 0) + number
    alone = [repr(output.outputs[0].text) for output in names["alone"]]
    return texts_of(printed), alone, found


def test_a_script_with_a_draft_model_writes_what_the_target_would() -> None:
    config = {"model": DRAFTER, "num_speculative_tokens": 5, "method": "draft_model"}
    texts, alone, accepted = drafted(config)
    assert texts == alone
    assert accepted["model"] > 5


@pytest.mark.slow
def test_a_script_with_n_grams_writes_what_the_target_would() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    texts, alone, accepted = drafted(config)
    assert texts == alone
    assert set(accepted) <= {"ngram"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_a_script_with_heads_writes_what_the_target_would(kind: str) -> None:
    config = {
        "model": str(MODELS / kind),
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 2,
        "method": kind,
    }
    texts, alone, accepted = drafted(config)
    assert texts == alone
    assert sum(accepted.values()) > 0


@pytest.mark.slow
def test_a_script_that_samples_by_rejection_runs() -> None:
    config = {
        "model": DRAFTER,
        "num_speculative_tokens": 4,
        "rejection_sample_method": "standard",
        "policy": "sync",
    }
    texts, _, accepted = drafted(config)
    assert len(texts) == 4
    assert accepted["model"] > 0


@pytest.mark.slow
def test_a_script_that_chats_and_reads_the_tokenizer_runs() -> None:
    script = f"""
        from slipstream import LLM, SamplingParams

        llm = LLM(model={TARGET!r}, max_num_seqs=2, speculative_config={{"method": "ngram"}})
        tokenizer = llm.get_tokenizer()
        conversation = [
            {{"role": "system", "content": "You are a helpful assistant"}},
            {{"role": "user", "content": "Write a function"}},
        ]
        prompt = tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        params = SamplingParams(temperature=0.5, seed=1, max_tokens=8, ignore_eos=True)
        (chatted,) = llm.chat(conversation, params, use_tqdm=False)
        (written,) = llm.generate(prompt, params)
        ids = tokenizer.encode(prompt)
        assert tokenizer.decode(ids) == prompt
        assert tokenizer.decode(ids[0]) == tokenizer.decode(ids[:1])
        assert tokenizer(prompt)["input_ids"] == ids
        assert tokenizer.apply_chat_template(conversation, add_generation_prompt=True) == ids
        assert prompt.startswith(tokenizer.apply_chat_template(conversation, tokenize=False))
        assert tokenizer.get_vocab()[tokenizer.convert_ids_to_tokens(ids)[0]] == ids[0]
        assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids)) == ids
        end = tokenizer.eos_token_id
        assert tokenizer.decode([end]) and not tokenizer.decode([end], skip_special_tokens=True)
        assert tokenizer.vocab_size <= len(tokenizer) == len(tokenizer.get_vocab())
        # The target's own end of a text is text where special tokens are not left out.
        forced = dict(max_tokens=3, ignore_eos=True, logit_bias={{end: 100}})
        (named,) = llm.generate("import", SamplingParams(skip_special_tokens=False, **forced))
        (left_out,) = llm.generate("import", SamplingParams(**forced))
        # To the end of the longest text.
        (longest,) = llm.generate([ids[0]] * 2040, SamplingParams(max_tokens=None, ignore_eos=True))
        """
    _, names = ran(script)
    chatted, written = names["chatted"], names["written"]
    assert chatted.prompt == written.prompt == names["prompt"]
    assert chatted.outputs[0].token_ids == written.outputs[0].token_ids
    end = names["tokenizer"].decode(names["end"])
    assert names["named"].outputs[0].text == end * 3
    assert names["left_out"].outputs[0].text == ""
    assert len(names["longest"].outputs[0].token_ids) == 8, "the model takes 2048"
    assert names["longest"].outputs[0].finish_reason == "length"


def test_a_script_with_the_models_own_parameters_reads_the_figures_of_all_texts() -> None:
    script = f"""
        from slipstream import LLM, Counter, Vector

        llm = LLM(
            model={TARGET!r},
            tokenizer={TARGET!r},
            generation_config="auto",
            enforce_eager=True,
            disable_log_stats=False,
            speculative_config={{"model": {DRAFTER!r}, "policy": "sync"}},
        )
        sampling_params = llm.get_default_sampling_params()
        sampling_params.temperature, sampling_params.max_tokens = 0.5, 40
        outputs = llm.generate(["import os", "class Queue:"], sampling_params)
        found = {{metric.name: metric for metric in llm.get_metrics()}}
        """
    _, names = ran(script)
    found, outputs = names["found"], names["outputs"]
    assert names["llm"].pair.config.backend == "fused"
    written = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert found["vllm:generation_tokens"].value == written
    assert found["vllm:request_success"].value == 2
    by_place = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    assert found["vllm:spec_decode_num_accepted_tokens"].value == sum(by_place) > 5


def test_a_script_that_streams_from_an_event_loop_gets_what_is_new() -> None:
    script = f"""
        import asyncio
        from slipstream import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

        async def main():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model={TARGET!r}))
            texts = {{}}
            try:
                for kind in RequestOutputKind:
                    params = SamplingParams(max_tokens=20, seed=42, output_kind=kind)
                    texts[kind.name] = [
                        output.outputs[0].text
                        async for output in engine.generate(
                            request_id=kind.name, prompt="import os", sampling_params=params
                        )
                    ]
            finally:
                engine.shutdown()
            return texts

        texts = asyncio.run(main())
        """
    _, names = ran(script)
    texts = names["texts"]
    (whole,) = texts["FINAL_ONLY"]
    assert whole
    assert len(texts["DELTA"]) > 1
    assert "".join(texts["DELTA"]) == whole == texts["CUMULATIVE"][-1]
    assert texts["CUMULATIVE"][0] == texts["DELTA"][0]
