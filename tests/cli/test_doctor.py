"""What the doctor says of a machine and of models, and that it opens no weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.bench import machine
from dlite_agent.cli.doctor import _warnings
from dlite_agent.cli.main import main
from dlite_agent.cli.model_report import inspect_model
from dlite_agent.config import DType, EngineConfig
from dlite_agent.models.weights import load_target
from tests.tiny_checkpoint import write_checkpoint

GIB = 2**30


@pytest.fixture(autouse=True)
def _small_buffer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth is measured by every call, over the whole buffer only where it is the point."""
    if "bandwidth" not in request.node.name:
        monkeypatch.setitem(machine.read_bandwidth.__kwdefaults__, "buffer_bytes", 2**25)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main(["doctor", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def write_config(folder: Path, **changes: object) -> Path:
    """A checkpoint of the shape of Qwen3-4B, with weights that nobody can read."""
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "model.safetensors").write_bytes(b"not weights")
    return folder


def test_the_machine_has_versions_a_device_and_a_measured_bandwidth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, report = doctor(capsys)
    assert status == 0
    assert report["model"] is None
    machine = report["machine"]
    assert {"python", "torch", "transformers", "dlite-agent"} <= set(machine["versions"])
    assert machine["device"] in ("cpu", "cuda")
    assert machine["processor"]
    assert "float32" in machine["dtypes"]
    assert machine["free_bytes"] > 0
    assert machine["threads"] >= 1
    assert machine["compiler"] == shutil.which("gcc")
    assert machine["cache_folder"] == str(EngineConfig().cache_folder())
    assert "uvicorn" in machine["versions"]
    assert 1e8 < machine["read_bandwidth_bytes_s"] < 1e13


def test_text_says_the_same_in_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model")
    assert main(["doctor", str(folder), "--vram", "24"]) == 0
    shown = capsys.readouterr().out
    assert "GB/s read, measured with" in shown
    assert "4,022.5M parameters" in shown
    assert "weights        8.2 GiB in bfloat16" in shown, "the tied head counts once more"
    assert "KV             147,456 bytes a token" in shown
    assert "40,960 tokens fit into 24.0 GiB; rope limit 40,960" in shown
    assert "drafter        auto: suffix: where it pays" in shown
    assert '"factor": 4.0, "original_max_position_embeddings": 32768}' in shown, "its model card"
    assert "\x1b" not in shown


def test_a_model_that_fits_in_part_is_told_with_numbers(tmp_path: Path) -> None:
    folder = str(write_config(tmp_path / "model"))
    report = inspect_model(EngineConfig(folder), memory_bytes=10 * GIB, is_planned=True)
    room = int(10 * GIB * 0.9) - report.weight_bytes
    assert report.runs_here
    assert report.context_that_fits == room // 147_456
    assert 0 < report.default_context < report.context_that_fits < report.rope_limit
    advice = "\n".join(report.advice)
    assert f"max_kv_bytes={report.context_that_fits * 147_456}" in advice
    assert f"max_context={report.context_that_fits}" in advice


def test_a_model_that_does_not_fit_is_a_no(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "model")
    status, report = doctor(capsys, str(folder), "--vram", "4")
    assert status == 1
    assert report["model"]["supported"] is True
    assert report["model"]["runs_here"] is False
    assert report["model"]["context_that_fits"] == 0
    assert "smaller model" in report["model"]["advice"][0]


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float64", 8), ("bfloat16", 2)])
def test_sizes_are_those_of_the_type(tmp_path: Path, dtype: DType, itemsize: int) -> None:
    folder = str(write_checkpoint(tmp_path))
    report = inspect_model(EngineConfig(folder, dtype=dtype, device="cpu"), memory_bytes=GIB)
    with load_target(folder, dtype=dtype) as target:
        assert report.kv_bytes_per_token == target.config.kv_bytes_per_token(itemsize)
    on_disk = (tmp_path / "model.safetensors").stat().st_size
    head = 288 * 64 * itemsize if dtype == "bfloat16" else 0  # kept twice, for re-scoring
    assert report.weight_bytes == pytest.approx(on_disk / 4 * itemsize + head, rel=0.01)


def test_the_default_context_is_that_of_a_load(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path, max_positions=10**9))
    report = inspect_model(EngineConfig(folder, dtype="float32", device="cpu"), memory_bytes=GIB)
    assert report.default_context == pytest.approx(GIB / 4 / report.kv_bytes_per_token, rel=0.01)


def test_an_awq_folder_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantized = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    folder = write_config(tmp_path / "Qwen3-4B-AWQ", **quantized)
    status, report = doctor(capsys, str(folder))
    assert status == 1
    assert "Qwen3-4B-AWQ" in report["model"]["refusal"]
    assert "'awq'" in report["model"]["refusal"]
    assert main(["doctor", str(folder)]) == 1
    assert "refused" in capsys.readouterr().out
    assert main(["chat", str(folder)]) == 2
    assert "'awq'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Nobody/Has-This-Model", "./nowhere", "nano2", "a/b/c"])
def test_an_unknown_model_is_refused_with_advice_within_seconds(name: str) -> None:
    began_s = time.perf_counter()
    report = inspect_model(EngineConfig(name), memory_bytes=GIB, is_planned=True)
    assert not report.runs_here
    assert name in (report.refusal or "")
    assert "check the" in (report.refusal or "")
    assert time.perf_counter() - began_s < 20.0


def test_an_unknown_model_is_a_no(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = doctor(capsys, "./nowhere")
    assert status == 1
    assert report["model"]["supported"] is False
    assert report["machine"]["versions"]["torch"]


@pytest.mark.parametrize("vram", ["0", "-1", "nan", "inf"])
def test_a_memory_that_is_none_is_refused(vram: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "nano", "--vram", vram]) == 2
    assert "--vram 24" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--vram 24", "--vram plans for a model; name one"),
        ("--quantize int8", "--quantize plans for a model"),
        ("nano turns.jsonl --dtype float32", "--dtype says nothing of transcripts"),
        ("nano --history template", "--history is for transcripts"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *argv.split()]) == 2
    assert said in capsys.readouterr().err


def test_what_is_missing_is_told_with_what_to_do() -> None:
    versions = {"langchain": None, "fastapi": None, "uvicorn": "1"}
    langchain, server = _warnings(versions, "/usr/bin/gcc", is_cuda=False)
    assert "dlite-agent[demo]" in langchain
    assert "dlite-agent[server]" in server
    there: dict[str, str | None] = dict.fromkeys(versions, "1")
    assert _warnings(there, "/usr/bin/gcc", is_cuda=False) == []
    assert "install gcc" in _warnings(there, None, is_cuda=False)[0]


def test_another_limit_scales_from_itself(tmp_path: Path) -> None:
    folder = str(write_config(tmp_path / "model", max_position_embeddings=8192))
    report = inspect_model(EngineConfig(folder), memory_bytes=24 * GIB, is_planned=True)
    assert '"original_max_position_embeddings": 8192}' in "\n".join(report.advice)


def test_no_weights_are_opened(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model")
    code = (
        "import sys\n"
        "opened = []\n"
        "def hook(event, arguments):\n"
        "    if event == 'open': opened.append(str(arguments[0]))\n"
        "sys.addaudithook(hook)\n"
        "from dlite_agent.cli.main import main\n"
        f"status = main(['doctor', {str(folder)!r}, '--vram', '24', '--json'])\n"
        "print([name for name in opened if name.endswith(('.safetensors', 'config.json'))],"
        " file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == str([str(folder / "config.json")])
    assert json.loads(done.stdout)["model"]["supported"] is True


YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'


def test_stretched_positions_raise_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_config(tmp_path / "model"))
    status, report = doctor(capsys, folder, "--vram", "80", "--rope-scaling", YARN)
    assert status == 0
    assert report["model"]["rope_limit"] == 131_072
    assert report["model"]["context_that_fits"] == 131_072
    assert report["model"]["rope_scaling"].startswith("yarn factor=4.0")
    assert main(["doctor", folder, "--vram", "80", "--rope-scaling", YARN]) == 0
    assert "rope scaling   yarn factor=4.0" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["yarn", '{"type": "spiral"}', '{"type": "yarn"}'])
def test_scaling_that_makes_no_sense_is_refused(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "nano", "--rope-scaling", given]) == 2
    assert "rope" in capsys.readouterr().err


def test_int8_halves_what_the_weights_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_config(tmp_path / "model"))
    _, plain = doctor(capsys, folder, "--vram", "24")
    _, packed = doctor(capsys, folder, "--vram", "24", "--quantize", "int8")
    assert packed["model"]["quantize"] == "int8"
    assert 0.5 < packed["model"]["weight_bytes"] / plain["model"]["weight_bytes"] < 0.56
    assert main(["doctor", folder, "--vram", "24", "--quantize", "int8"]) == 0
    assert "in int8 (computed in bfloat16)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "spiral"}}, "'spiral' is not supported; use 'default'"),
        ({"use_sliding_window": True, "max_window_layers": 0}, "sliding-window"),
        ({"num_key_value_heads": 5}, "is not a multiple of num_key_value_heads=5"),
    ],
)
def test_config_that_cannot_be_run_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], refusal: str
) -> None:
    folder = str(write_config(tmp_path / "model", **changes))
    report = inspect_model(EngineConfig(folder), memory_bytes=80 * GIB, is_planned=True)
    assert not report.supported
    assert refusal in (report.refusal or "")


def test_gguf_is_told_how_large_it_becomes(
    smollm2: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", smollm2, "--vram", "1"]) == 0
    shown = capsys.readouterr().out
    wanted = (
        "weights        310.6 MiB in bfloat16, dequantised from 92.1 MiB of GGUF (Q4_1, Q8_0, F32)"
    )
    assert wanted in shown
    assert "LlamaForCausalLM, 134.5M parameters" in shown
