"""The account of a pair's memory, before anything is loaded."""

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.api.config import PairConfig
from coordinator.api.models import account as module
from coordinator.api.models.account import Account, account_of
from coordinator.api.models.nodes import node_configs
from coordinator.api.models.sizes import sizes_of_node
from coordinator.cli.account_view import explaining, lines_of
from coordinator.cli.app import command_line
from coordinator.launching import devices
from proto.errors import NodeError
from proto.messages import Role

GB = 10**9


def save_model(out: Path, hidden: int, num_layers: int, *, is_fp8: bool = False) -> Path:
    """Write config.json and the list of tensors of a model of the llama family, without numbers."""
    out.mkdir()
    inner, vocab, groups = 4 * hidden, 32000, hidden // 512
    fields = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "intermediate_size": inner,
        "num_attention_heads": hidden // 128,
        "head_dim": 128,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "dtype": "bfloat16",
        "max_position_embeddings": 32768,
    }
    if is_fp8:
        fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (out / "config.json").write_text(json.dumps(fields))
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden]}
    for layer in range(num_layers):
        base = f"model.layers.{layer}."
        for name, shape in (
            *(("q_proj", [hidden, hidden]), ("o_proj", [hidden, hidden])),
            *(("k_proj", [128 * groups, hidden]), ("v_proj", [128 * groups, hidden])),
        ):
            shapes[f"{base}self_attn.{name}.weight"] = shape
        for name, shape in (
            *(("gate_proj", [inner, hidden]), ("up_proj", [inner, hidden])),
            ("down_proj", [hidden, inner]),
        ):
            shapes[f"{base}mlp.{name}.weight"] = shape
    header, at = {}, 0
    for name, shape in shapes.items():
        kind = "F8_E4M3" if is_fp8 and "proj" in name else "BF16"
        end = at + prod(shape) * (1 if kind == "F8_E4M3" else 2)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with (out / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return out


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Models of 14 and 0.7 billion parameters."""
    out = tmp_path_factory.mktemp("models")
    return {
        "large": str(save_model(out / "large", 5120, 36)),
        "small": str(save_model(out / "small", 1024, 10)),
    }


def has(num_bytes: int) -> Callable[[str], int]:
    """Every device has so much memory."""
    return lambda _: num_bytes


def of_one_gpu(models: dict[str, str], total: int, **settings: object) -> Account:
    """The account of a pair on one GPU."""
    fields = {"target": models["large"], "drafter": models["small"], "target_device": "cuda:0"}
    config = PairConfig(**{**fields, "drafter_device": "cuda:0", **settings})  # type: ignore[arg-type]
    return account_of(config, memory=has(total))


def test_both_models_are_on_a_shared_device_and_what_they_take_adds_up(
    models: dict[str, str],
) -> None:
    account = of_one_gpu(models, 80 * GB)
    assert account.refusal == ""
    (device,) = account.devices
    target, drafter = device.items
    assert (target.role, drafter.role) == (Role.TARGET, Role.DRAFTER)
    assert 27 * GB < target.stated.sizes.weights < 30 * GB
    assert device.taken == target.total + drafter.total < 80 * GB
    shown = list(lines_of(account))
    assert shown[0] == "cuda:0: 80.00 GB"
    assert shown[1] == "  target: large"
    assert shown[-1].split() == ["left", f"{(80 * GB - device.taken) / 1e9:.2f}", "GB"]
    assert all(len(line) <= 80 for line in shown)


def test_the_target_is_reserved_before_the_drafter_takes_its_cache(
    models: dict[str, str],
) -> None:
    (device,) = of_one_gpu(models, 40 * GB).devices
    target, drafter = device.items
    assert drafter.utilization.peer_bytes == target.stated.sizes.weights
    alone = 40 * GB - target.stated.sizes.weights
    assert drafter.cache < 0.4 * 0.4 * alone
    # On a device of its own nothing is reserved.
    account = of_one_gpu(models, 40 * GB, drafter_device="cuda:1")
    assert [device.names for device in account.devices] == [("cuda:0",), ("cuda:1",)]
    assert account.devices[1].items[0].utilization.peer_bytes == 0


def test_ranks_that_are_alike_are_shown_once_and_have_a_part_each(models: dict[str, str]) -> None:
    whole = of_one_gpu(models, 80 * GB).devices[0].items[0].stated.sizes
    account = of_one_gpu(models, 80 * GB, target_device="cuda:0-1", drafter_device="cuda:2")
    both, own = account.devices
    assert (both.names, own.names) == (("cuda:0", "cuda:1"), ("cuda:2",))
    part = both.items[0].stated.sizes
    assert 0.5 * whole.weights < part.weights < 0.53 * whole.weights
    assert part.slot == whole.slot // 2


def test_several_targets_are_in_the_account_each_on_its_own_device(
    models: dict[str, str],
) -> None:
    account = of_one_gpu(models, 80 * GB, targets=2, target_device="cuda:0-1", drafter_device="")
    names = [device.names for device in account.devices]
    roles = [[item.role for item in device.items] for device in account.devices]
    assert names[0] == ("cuda:0", "cuda:1")
    assert roles[0] == [Role.TARGET]


def test_what_does_not_fit_is_refused_in_one_line_with_what_would(models: dict[str, str]) -> None:
    line = of_one_gpu(models, 20 * GB).refusal
    assert line.startswith("the weights take 28.")
    assert line.endswith("; what fits: a smaller model, fewer bits or more devices")
    line = of_one_gpu(models, 34 * GB, max_model_len=32768).refusal
    assert line.startswith("a cache for 32768 tokens of the target takes ")
    assert "; what fits: --max-model-len " in line
    longest = int(line.split("--max-model-len ")[1].split()[0])
    assert 256 <= longest < 32768
    assert of_one_gpu(models, 34 * GB, max_model_len=longest).refusal == ""
    line = of_one_gpu(models, 33 * GB, drafter=models["large"], max_num_seqs=1).refusal
    assert line.endswith("; what fits: the target without this drafter (--drafter ngram)")
    assert of_one_gpu(models, 34 * GB, max_model_len=longest + 256).refusal != ""
    assert "\n" not in line


def test_nothing_is_refused_where_the_memory_is_not_known(models: dict[str, str]) -> None:
    config = PairConfig(target=models["large"], drafter="ngram", target_device="cuda:0")
    account = account_of(config, memory=lambda _: None)
    assert account.refusal == ""
    assert next(lines_of(account)) == "cuda:0: memory not known here"


def test_a_quantised_target_reserves_what_it_takes_and_not_what_its_files_have(
    models: dict[str, str], tmp_path: Path
) -> None:
    packed = str(save_model(tmp_path / "fp8", 1024, 10, is_fp8=True))
    config = PairConfig(target=packed, drafter=models["small"])
    target, drafter = node_configs(config, endpoint="", outside="", secret="", drafts=True)
    assert drafter.peer_bytes == sizes_of_node(target).sizes.weights
    assert drafter.peer_bytes > 1.5 * (Path(packed) / "model.safetensors").stat().st_size * 0.9


def test_a_dry_run_shows_the_account_and_starts_nothing(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.cli.generate.Pair", lambda *_, **__: pytest.fail("started"))
    flags = ["--target", models["large"], "--drafter", models["small"], "--dry-run"]
    flags += ["--target-device", "cuda:0", "--drafter-device", "cuda:0"]
    monkeypatch.setattr(module, "gpu_memory", lambda _: 80 * GB)
    done = CliRunner().invoke(command_line([]), ["generate", *flags])
    assert done.exit_code == 0
    assert "cache, 8 texts of" in done.output
    monkeypatch.setattr(module, "gpu_memory", lambda _: 20 * GB)
    for command in ("generate", "serve"):
        done = CliRunner().invoke(command_line([]), [command, *flags])
        assert done.exit_code == 1
        assert "what fits: a smaller model" in str(done.exception) + done.output


def test_a_refusal_for_lack_of_memory_comes_behind_the_account(
    models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = PairConfig(
        target=models["small"],
        drafter="ngram",
        gpu_memory_utilization=0.001,
        max_model_len=2048,
    )
    lack = "m: a cache for 2048 tokens takes 1.0 GB, and cpu has 0.0 GB for it; raise the share"
    with pytest.raises(NodeError, match="a cache for 2048"), explaining(config, drafts=True):
        raise NodeError(lack)
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("cpu: ")
    assert shown[-1] == "what fits: a higher --gpu-memory-utilization"
    with pytest.raises(NodeError), explaining(config, drafts=True):
        raise NodeError("it was killed")
    assert capsys.readouterr().err == ""


def test_the_memory_of_a_gpu_is_what_nvidia_smi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["GPU-b", "GPU-a", "7"])
    rows = [["GPU-a", "0", "81559 MiB"], ["GPU-b", "1", "24564 MiB"], ["GPU-c", "7", "[N/A]"]]
    monkeypatch.setattr(devices, "_asked", lambda _: rows)
    found = [devices.gpu_memory(number) for number in range(4)]
    assert found == [24564 << 20, 81559 << 20, None, None]
