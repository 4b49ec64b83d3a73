"""Measures any server of the OpenAI API under load: `tokenway bench`.

It owns what is sent and when, and what is made of the answers; it must never know a server's insides: whatever is told
comes from the stream that a client sees and from `usage`.
"""
