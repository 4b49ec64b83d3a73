"""The detokenizer process: ids to text, stop strings, and the last word on where an answer ends.

It owns one incremental decoder per open answer, all of which can be rebuilt from ids; it holds nothing else. It imports
neither torch nor a tokenizer library: a table of the bytes of each token is all that it needs.
"""
