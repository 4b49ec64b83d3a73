"""The tokenizer process: HTTP, chat templates, tokenization, client streams and the journal of open requests.

Never imports torch and never blocks its event loop on a long prompt.
"""
