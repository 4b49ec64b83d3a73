"""gpu_worker: where weights come from: safetensors files and GGUF files. No other kind of file is ever opened."""
