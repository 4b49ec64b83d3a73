"""gpu_worker: checkpoints whose matrices were quantized before they were published, and how each form is decoded."""
