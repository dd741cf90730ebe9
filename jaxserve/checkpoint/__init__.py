"""Reading models from disk: Hugging Face safetensors, GGUF, and our Orbax store."""
