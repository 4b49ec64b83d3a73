"""What lies on disk of a model, read without torch: configuration, tokenizer, vocabulary, sampling defaults.

Used by the tokenizer, the detokenizer, the worker and the launcher. Nothing here opens a weights tensor, runs code that
came with a model or reads a pickle (`.bin`, `.pt` and `.py` files are never opened).
"""
