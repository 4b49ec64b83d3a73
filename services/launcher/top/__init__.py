"""Shows the stages of a running group live: `tokenway top`.

It owns what is read from /metrics and how it is laid out; it must never know more of a server than its metrics tell.
"""
