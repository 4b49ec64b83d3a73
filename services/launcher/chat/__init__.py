"""A chat in the terminal with any server of the OpenAI API: `tokenway chat`.

It owns the conversation and its history of inputs; it must never need a server of ours: what only ours tells (timings,
cached tokens) is shown when it is there.
"""
