"""P-EAGLE parallel speculative decoding for Hugging Face transformers."""

from .configuration_peagle import PEagleConfig
from .integration import install, uninstall
from .modeling_peagle import PEagleDrafterModel
from .stats import SpeculationStats, collect_statistics
from .version import __version__

__all__ = [
    "PEagleConfig",
    "PEagleDrafterModel",
    "SpeculationStats",
    "__version__",
    "collect_statistics",
    "install",
    "uninstall",
]
