"""What users of other programs type first, by their own quick starts, and what it does here.

Each row: the command as that program's documentation has it; the same with our program in front;
and either the settings that it means here (those that differ from our defaults), or how its line
begins, which says what to do.
"""

import shlex
from typing import Any

OPT = "facebook/opt-6.7b"
QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"
EAGLE3 = "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"

Row = tuple[str, str, dict[str, Any] | str]

VLLM: list[Row] = [
    (f"vllm serve {QWEN}", f"serve {QWEN}", {"target": QWEN}),
    (
        "python -m vllm.entrypoints.openai.api_server --model facebook/opt-125m",
        "serve --model facebook/opt-125m",
        {"target": "facebook/opt-125m"},
    ),
    (
        f"vllm serve {OPT} --host 0.0.0.0 --port 8000 -tp 1 --gpu_memory_utilization 0.8 "
        '--speculative_config \'{"model": "facebook/opt-125m", "num_speculative_tokens": 5, '
        '"method": "draft_model"}\'',
        f"serve {OPT} --host 0.0.0.0 --port 8000 -tp 1 --gpu_memory_utilization 0.8 "
        '--speculative_config \'{"model": "facebook/opt-125m", "num_speculative_tokens": 5, '
        '"method": "draft_model"}\'',
        {
            "target": OPT,
            "drafter": "facebook/opt-125m",
            "host": "0.0.0.0",
            "gpu_memory_utilization": 0.8,
            "num_speculative_tokens": 5,
        },
    ),
    (
        f"vllm serve {OPT} --seed 42 -tp 1",
        f"serve {OPT} --seed 42 -tp 1",
        '--seed: clients send "seed" with each request',
    ),
    (
        f"vllm serve {QWEN} --speculative-config "
        '\'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'',
        f"serve {QWEN} --speculative-config "
        '\'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\'',
        {"target": QWEN, "drafter": "ngram", "num_speculative_tokens": 5},
    ),
    (
        f"vllm serve {LLAMA} -tp 4 --speculative-config "
        f'\'{{"method": "eagle3", "model": "{EAGLE3}", "num_speculative_tokens": 2, '
        '"draft_tensor_parallel_size": 1}\'',
        f"serve {LLAMA} -tp 4 --speculative-config "
        f'\'{{"method": "eagle3", "model": "{EAGLE3}", "num_speculative_tokens": 2, '
        '"draft_tensor_parallel_size": 1}\'',
        {
            "target": LLAMA,
            "drafter": EAGLE3,
            "tensor_parallel_size": 4,
            "num_speculative_tokens": 2,
        },
    ),
    (
        f"vllm serve {OPT} --speculative-model facebook/opt-125m --num-speculative-tokens 5",
        f"serve {OPT} --speculative-model facebook/opt-125m --num-speculative-tokens 5",
        {"target": OPT, "drafter": "facebook/opt-125m", "num_speculative_tokens": 5},
    ),
    (
        f"vllm serve {QWEN} --speculative-config.method ngram",
        f"serve {QWEN} --speculative-config.method ngram",
        '--speculative-config.method: write one JSON object, --speculative-config \'{"method": ',
    ),
    (
        f"vllm serve {QWEN} --dtype half --max-model-len 8192 --gpu-memory-utilization 0.9 "
        "--max-num-seqs 16 --enable-prefix-caching --enforce-eager",
        f"serve {QWEN} --dtype half --max-model-len 8192 --gpu-memory-utilization 0.9 "
        "--max-num-seqs 16 --enable-prefix-caching --enforce-eager",
        {
            "target": QWEN,
            "dtype": "float16",
            "max_model_len": 8192,
            "gpu_memory_utilization": 0.9,
            "max_num_seqs": 16,
            "backend": "fused",
        },
    ),
    (
        f"vllm serve {QWEN} --api-key token-abc123 --served-model-name qwen --load-format auto",
        f"serve {QWEN} --api-key token-abc123 --served-model-name qwen --load-format auto",
        {"target": QWEN, "api_key": ("token-abc123",), "served_model_name": "qwen"},
    ),
    (
        f"vllm serve {QWEN} --quantization awq --reasoning-parser qwen3",
        f"serve {QWEN} --quantization awq --reasoning-parser qwen3",
        {"target": QWEN, "reasoning_parser": "qwen3"},
    ),
    (
        f"vllm serve {QWEN} --attention-backend FLASH_ATTN",
        f"serve {QWEN} --attention-backend FLASH_ATTN",
        "--attention-backend: --backend says which forward pass",
    ),
    (
        f"vllm serve {QWEN} --trust-remote-code",
        f"serve {QWEN} --trust-remote-code",
        "--trust-remote-code: this is no setting here: code that comes with a checkpoint is never",
    ),
    (
        f"vllm serve {QWEN} --enable-auto-tool-choice --tool-call-parser hermes",
        f"serve {QWEN} --enable-auto-tool-choice --tool-call-parser hermes",
        "--tool-call-parser: the target's template says how it writes calls",
    ),
    (
        f"vllm serve {QWEN} --enable-lora --lora-modules sql-lora=path",
        f"serve {QWEN} --enable-lora --lora-modules sql-lora=path",
        "--enable-lora: adapters are not loaded; merge yours",
    ),
    (
        "vllm chat --url http://localhost:8000/v1",
        "chat --url http://localhost:8000/v1",
        "--url: the models are loaded by this command",
    ),
    (
        "vllm run-batch -i batch.jsonl -o results.jsonl --model " + QWEN,
        "run-batch -i batch.jsonl -o results.jsonl --model " + QWEN,
        "there is no command 'run-batch'; `python -m coordinator generate --prompt-file FILE",
    ),
]

LLAMA_CPP: list[Row] = [
    (
        'llama-cli -m model.gguf -p "I believe the meaning of life is" -n 128 -no-cnv',
        'generate -m model.gguf -p "I believe the meaning of life is" -n 100 -no-cnv',
        {"target": "model.gguf", "prompt": "I believe the meaning of life is", "max_tokens": 100},
    ),
    (
        "llama-cli -m model.gguf --temp 1.0 --top-p 0.95 --top-k 40 -s 7 -p '- a list'",
        "generate -m model.gguf --temp 1.0 --top-p 0.95 --top-k 40 -s 7 -p '- a list'",
        {
            "target": "model.gguf",
            "prompt": "- a list",
            "temperature": 1.0,
            "top_p": 0.95,
            "top_k": 40,
            "seed": 7,
        },
    ),
    (
        "llama-cli -m model.gguf -n -1 --repeat-penalty 1.1 -fa on -p Hi",
        "generate -m model.gguf -n -1 --repeat-penalty 1.1 -fa on -p Hi",
        {
            "target": "model.gguf",
            "prompt": "Hi",
            "max_tokens": (1 << 20) - 1,
            "repetition_penalty": 1.1,
        },
    ),
    ("llama-cli -m model.gguf -cnv", "chat -m model.gguf -cnv", {"target": "model.gguf"}),
    (
        'llama-cli -m model.gguf -p "You are a helpful assistant" -cnv',
        'chat -m model.gguf -p "You are a helpful assistant" -cnv',
        "-p: messages come from the terminal or a pipe; --system TEXT is the system message",
    ),
    (
        "llama-cli -m model.gguf -sys 'Be brief.' -c 4096",
        "chat -m model.gguf -sys 'Be brief.' -c 4096",
        {"target": "model.gguf", "system": "Be brief.", "max_model_len": 4096},
    ),
    (
        "llama-cli -m model.gguf -n 256 --grammar-file grammars/json.gbnf -p 'Request: '",
        "generate -m model.gguf -n 256 --grammar-file grammars/json.gbnf -p 'Request: '",
        "--grammar-file: `python -m coordinator generate` has --regex PATTERN and --json-schema",
    ),
    (
        "llama-cli -m model.gguf -f prompt.txt",
        "generate -m model.gguf -f prompt.txt",
        "-f: `- < FILE` continues the whole file; --prompt-file FILE continues each of its",
    ),
    (
        "llama-cli -m model.gguf",
        "-m model.gguf",
        "-m belongs behind a command, such as `python -m coordinator generate -m`",
    ),
    (
        "llama-server -m model.gguf --port 8080",
        "serve -m model.gguf --port 8080",
        {"target": "model.gguf", "port": 8080},
    ),
    (
        "llama-server -m model.gguf -md draft.gguf --draft-max 8 --jinja",
        "serve -m model.gguf -md draft.gguf --draft-max 8 --jinja",
        {"target": "model.gguf", "drafter": "draft.gguf", "num_speculative_tokens": 8},
    ),
    (
        "llama-server -m model.gguf -c 16384 -np 4",
        "serve -m model.gguf -c 16384 -np 4",
        "llama.cpp divides -c 16384 among -np 4 texts; here each text has its own room: "
        "--max-model-len 4096 --max-num-seqs 4",
    ),
    (
        "llama-server -hf ggml-org/gemma-3-1b-it-GGUF",
        "serve -hf ggml-org/gemma-3-1b-it-GGUF",
        "-hf: a GGUF file is downloaded first: --target FILE.gguf",
    ),
    (
        "llama-server -m model.gguf -ngl 99 -c 65536",
        "serve -m model.gguf -ngl 99 -c 65536",
        "-ngl: a model is on its device as a whole; --target-device and --drafter-device say",
    ),
    (
        "llama-server -m model.gguf --spec-type ngram-simple --draft-max 64",
        "serve -m model.gguf --spec-type ngram-simple --draft-max 16",
        {"target": "model.gguf", "drafter": "ngram", "num_speculative_tokens": 16},
    ),
    (
        "llama-server -m model.gguf --embedding --pooling cls -ub 8192",
        "serve -m model.gguf --embedding --pooling cls -ub 8192",
        "--embedding: texts are generated, and nothing else",
    ),
]

HUGGING_FACE: list[Row] = [
    (f"transformers chat {QWEN}", f"chat {QWEN}", {"target": QWEN}),
    (
        f"transformers chat {QWEN} max_new_tokens=64 do_sample=True",
        f"chat {QWEN} max_new_tokens=64 do_sample=True",
        "too many arguments: max_new_tokens=64 do_sample=True; write --max-tokens 64",
    ),
    (
        "transformers serve --force-model Qwen/Qwen3.5-0.8B --port 8000 --continuous-batching",
        "serve --force-model Qwen/Qwen3.5-0.8B --port 8000 --continuous-batching",
        {"target": "Qwen/Qwen3.5-0.8B"},
    ),
    (
        f"transformers serve {QWEN} --device cuda --dtype bfloat16",
        f"serve {QWEN} --device cuda --dtype bfloat16",
        {"target": QWEN, "target_device": "cuda:0", "dtype": "bfloat16"},
    ),
    (
        "transformers serve --enable-cors",
        "serve --enable-cors",
        "--enable-cors: --allow-origin ORIGIN lets web pages in",
    ),
    (
        "python run_generation.py --model_name_or_path=gpt2 --assistant_model=distilgpt2 "
        "--max_new_tokens=40 --prompt='Hello, I am'",
        "generate --model_name_or_path=gpt2 --assistant_model=distilgpt2 --max_new_tokens=40 "
        "--prompt='Hello, I am'",
        {"target": "gpt2", "drafter": "distilgpt2", "max_tokens": 40, "prompt": "Hello, I am"},
    ),
]

SGLANG: list[Row] = [
    (
        f"python -m sglang.launch_server --model-path {LLAMA} --tp 2 --mem-fraction-static 0.7",
        f"serve --model-path {LLAMA} --tp 2 --mem-fraction-static 0.7",
        {"target": LLAMA, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.7},
    ),
    (
        "python3 -m sglang.launch_server --model Qwen/Qwen2.5-7B-Instruct --speculative-algorithm "
        f"STANDALONE --speculative-draft-model-path {QWEN}",
        "serve --model Qwen/Qwen2.5-7B-Instruct --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {QWEN}",
        {"target": "Qwen/Qwen2.5-7B-Instruct", "drafter": QWEN},
    ),
    (
        f"python3 -m sglang.launch_server --model {LLAMA} --speculative-algorithm EAGLE3 "
        "--speculative-num-steps 3 --speculative-eagle-topk 4",
        f"serve --model {LLAMA} --speculative-algorithm EAGLE3 --speculative-num-steps 3 "
        "--speculative-eagle-topk 4",
        "--speculative-num-steps: --window says how far the drafter runs ahead",
    ),
    (
        f"python -m sglang.launch_server --model-path {LLAMA} --chunked-prefill-size 4096",
        f"serve --model-path {LLAMA} --chunked-prefill-size 4096",
        "--chunked-prefill-size: prompts are read in parts whose size is chosen here",
    ),
]

OLLAMA: list[Row] = [
    (
        "ollama run gemma3",
        "run gemma3",
        "there is no command 'run'; `python -m coordinator chat --target MODEL` talks to a model",
    ),
    (
        'ollama run llama3.2 "Why is the sky blue?" --verbose',
        'run llama3.2 "Why is the sky blue?" --verbose',
        "there is no command 'run'; `python -m coordinator chat --target MODEL` talks to a model",
    ),
    (
        "ollama pull llama3.2",
        "pull llama3.2",
        "there is no command 'pull'; a model is downloaded on its first use",
    ),
    ("ollama list", "list", "there is no command 'list'; models are folders, or names on the"),
    ("ollama ps", "ps", "there is no command 'ps'; `python -m coordinator status` shows what runs"),
    ("ollama stop gemma3", "stop gemma3", "there is no command 'stop'; Ctrl-C ends a command"),
    ("ollama serve", "serve", {}),
]

ROWS = [*VLLM, *LLAMA_CPP, *HUGGING_FACE, *SGLANG, *OLLAMA]


def words(row: Row) -> list[str]:
    """The words behind our program's name."""
    return shlex.split(row[1])
