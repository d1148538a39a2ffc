"""The `custom_generate/generate.py` that a saved head carries, for `generate(custom_generate="<repo or folder>")`."""

from __future__ import annotations

from pathlib import Path

SOURCE = '''"""P-EAGLE decoding: target.generate(**inputs, assistant_model=head, custom_generate="<this repo>", trust_remote_code=True)."""


def generate(model, assistant_model=None, streamer=None, tokenizer=None, **kwargs):
    """Decodes with drafts of `assistant_model`, a P-EAGLE head; every other argument is generate()'s own."""
    if not getattr(assistant_model, "is_peagle_drafter", False):
        raise ValueError(
            f"assistant_model={type(assistant_model).__name__}: pass a P-EAGLE head, for example "
            'AutoModel.from_pretrained("<this repo>", trust_remote_code=True).'
        )
    if kwargs.get("stop_strings") is not None:
        # generate() does not hand a tokenizer on to a custom function, so the criterion is made here.
        from transformers import StoppingCriteriaList
        from transformers.generation.stopping_criteria import StopStringCriteria

        if tokenizer is None:
            raise ValueError("stop_strings: pass tokenizer= as well.")
        criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=kwargs.pop("stop_strings"))
        kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
    # What generate() was not given arrives as None; passing that on would hide its defaults.
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    return model.generate(custom_generate=assistant_model.bind(streamer=streamer), **kwargs)
'''


def write_custom_generate(folder: str | Path) -> None:
    """Puts the file into `folder/custom_generate/`, with the requirements that transformers checks."""
    target = Path(folder) / "custom_generate"
    target.mkdir(parents=True, exist_ok=True)
    (target / "generate.py").write_text(SOURCE, encoding="utf-8")
    (target / "requirements.txt").write_text("transformers>=5.17\n", encoding="utf-8")
