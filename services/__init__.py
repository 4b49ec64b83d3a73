"""Tokenway: a pipeline of processes that serves large language models.

    clients == HTTP/SSE ==> tokenizer xN -- Submit/Abort --> scheduler -- StepPlan --> gpu_worker
                               ^    ^  <- Admitted/Refused/Load -   |  <-- StepResult --
                               |    |                        TokensProduced
                               +-TextChunks-- detokenizer xM <------+ -- StopFound --> scheduler

Import rules, held by import-linter: launcher -> the four services -> model_files -> runtime -> wire; the four services
never import each other; torch is imported in gpu_worker only.
"""
