"""Checks what a server needs before it is started: `tokenway doctor`.

Each check says what it found and, where something is wrong, how to mend it. It changes nothing, fetches no weights and
must never load a library of the processes: what only those can tell, a child of theirs is asked.
"""
