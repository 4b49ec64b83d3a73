"""The launcher as an HTTP client: of our own servers and of any other that speaks the OpenAI API.

Bytes are read by one pure parser (`response`) under two shells: sockets that wait (`client`) for commands that ask one
thing at a time, and asyncio (`connection`) for many streams at once. It must never hold the state of a request beyond
its answer.
"""
