"""Publishing to a server that speaks the Hub's protocol, with the real client, and loading by name from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.heads import random_head
from tests.support.loopback_hub import running_hub
from tests.support.targets import tiny_target

ROOT = Path(__file__).parents[1]
LOAD = """
import sys
sys.modules["hf_peagle"] = None  # importing it fails, as where it is not installed
import torch
from transformers import AutoModel, AutoModelForCausalLM
head = AutoModel.from_pretrained("org/peagle-tiny", trust_remote_code=True)
target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = torch.arange(5, 12)[None]
plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
assert torch.equal(plain, target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=head))
print("done")
"""


def run(hub, tmp_path, *arguments, token=True):
    extra = hub.environment(tmp_path / "cache") if token else hub.environment(tmp_path / "cache", token=None)
    environment = {**os.environ, **extra, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, cwd=tmp_path)


@pytest.fixture
def head_folder(tmp_path):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path / "target")
    random_head(target, draft_vocab_size=50).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def test_publish_and_load_by_name(tmp_path, head_folder):
    with running_hub() as hub:
        done = run(hub, tmp_path, ROOT / "scripts/publish.py", head_folder, "org/peagle-tiny")
        assert done.returncode == 0, done.stderr[-3000:]
        loaded = run(hub, tmp_path, "-c", LOAD, tmp_path / "target")
        assert loaded.stdout.strip().endswith("done"), loaded.stderr[-3000:]


def test_a_dry_run_uploads_nothing(tmp_path, head_folder):
    with running_hub() as hub:
        done = run(hub, tmp_path, ROOT / "scripts/publish.py", head_folder, "org/peagle-tiny", "--dry-run")
        assert done.returncode == 0, done.stderr[-3000:]
        assert "model.safetensors" in done.stdout + done.stderr
        assert not hub.repos


def test_without_a_token_the_message_says_so(tmp_path, head_folder):
    with running_hub() as hub:
        done = run(hub, tmp_path, ROOT / "scripts/publish.py", head_folder, "org/peagle-tiny", token=False)
        assert done.returncode != 0
        assert "token" in (done.stdout + done.stderr).lower()
        assert "Traceback" not in done.stderr
        assert not hub.repos


def test_a_damaged_folder_is_not_published(tmp_path, head_folder):
    (head_folder / "model.safetensors").write_bytes(b"not tensors")
    with running_hub() as hub:
        done = run(hub, tmp_path, ROOT / "scripts/publish.py", head_folder, "org/peagle-tiny")
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert not hub.repos


@pytest.mark.parametrize("folder", sorted(p.parent for p in ROOT.glob("model_cards/*/head_card.json")), ids=lambda p: p.name)
def test_cards_are_what_the_generator_makes(folder):
    done = subprocess.run([sys.executable, ROOT / "scripts/model_card.py", folder, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("place", "status", "code"),
    [("create", 401, ""), ("create", 403, ""), ("commit", 409, ""), ("preupload", 404, "RepoNotFound"), ("upload", 507, "")],
)
def test_refusals_of_the_server_end_with_a_message_and_lose_nothing(tmp_path, head_folder, place, status, code):
    before = {path: path.read_bytes() for path in head_folder.rglob("*") if path.is_file()}
    with running_hub() as hub:
        hub.faults[place] = (status, code, "refused by the test")
        done = run(hub, tmp_path, ROOT / "scripts/publish.py", head_folder, "org/peagle-tiny")
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert str(status) in done.stderr + done.stdout or "refused" in done.stderr + done.stdout
        hub.faults.clear()
        again = run(hub, tmp_path, ROOT / "scripts/publish.py", head_folder, "org/peagle-tiny")
        assert again.returncode == 0, again.stderr[-2000:]
    assert all(path.read_bytes() == content for path, content in before.items())
