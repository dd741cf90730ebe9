"""Models on disk: Hugging Face directories, GGUF files, and our own Orbax store."""

from jaxserve.checkpoint.known_models import KNOWN_MODELS, KnownModel
from jaxserve.checkpoint.open import Checkpoint, convert, open_checkpoint
from jaxserve.checkpoint.pull import pull, resolve_model

__all__ = ["KNOWN_MODELS", "Checkpoint", "KnownModel", "convert", "open_checkpoint", "pull", "resolve_model"]
