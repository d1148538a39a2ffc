"""A saved head works where the package is not installed, and through `custom_generate="<folder>"`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.support.heads import random_head
from tests.support.targets import tiny_target

SCRIPT = """
    import sys
    if {blocked}:
        sys.modules["hf_peagle"] = None  # importing it fails, as where it is not installed
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    if not {blocked}:
        import hf_peagle
    head = AutoModel.from_pretrained({head!r}, trust_remote_code=True)
    assert AutoConfig.from_pretrained({head!r}, trust_remote_code=True).model_type == "peagle"
    target = AutoModelForCausalLM.from_pretrained({target!r})
    prompt = torch.arange(5, 12)[None]
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert torch.equal(plain, target.generate(prompt, max_new_tokens=20, do_sample=False, assistant_model=head))
    again = target.generate(
        prompt, max_new_tokens=20, do_sample=False, assistant_model=head, custom_generate={head!r}, trust_remote_code=True
    )
    assert torch.equal(plain, again)
    head.save_pretrained({again!r})
    AutoModel.from_pretrained({again!r}, trust_remote_code=True)
    print("done")
"""


@pytest.mark.parametrize("installed", [False, True])
def test_a_saved_head_works_with_and_without_the_package(tmp_path, installed):
    target, head = tiny_target("llama"), random_head(tiny_target("llama"), draft_vocab_size=50)
    target.save_pretrained(tmp_path / "target")
    head.save_pretrained(tmp_path / "head")
    script = SCRIPT.format(blocked=not installed, head=str(tmp_path / "head"), target=str(tmp_path / "target"), again=str(tmp_path / "again"))
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.strip().endswith("done"), done.stderr[-3000:]


def test_a_folder_without_code_loads_with_the_package(tmp_path):
    from transformers import AutoModel

    head = random_head(tiny_target("llama"))
    head.save_pretrained(tmp_path, save_code=False)
    assert not list(tmp_path.glob("*.py"))
    assert not (tmp_path / "custom_generate").exists()
    again = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(again.fc.weight, head.fc.weight)
