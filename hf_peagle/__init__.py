"""P-EAGLE parallel speculative decoding for Hugging Face transformers."""

from transformers import AutoConfig, AutoModel

from .candidate_generator import PEagleCandidateGenerator
from .configuration_peagle import PEagleConfig
from .integration import install, uninstall
from .modeling_peagle import PEagleDrafterModel
from .stats import SpeculationStats, collect_statistics
from .version import __version__

__all__ = [
    "PEagleCandidateGenerator",
    "PEagleConfig",
    "PEagleDrafterModel",
    "SpeculationStats",
    "__version__",
    "collect_statistics",
    "install",
    "uninstall",
]

# With the package installed, heads saved without code load through the Auto classes.
AutoConfig.register(PEagleConfig.model_type, PEagleConfig, exist_ok=True)
AutoModel.register(PEagleConfig, PEagleDrafterModel, exist_ok=True)
