"""gpu_worker: measures itself without a scheduler: its kernels one by one, or its steps. A child that prints JSON.

    python -m services.gpu_worker.bench kernels|engine OPTIONS      a worker's settings are in its environment

A line each: first `machine`, then a `row` as soon as it is measured, at the end `done`; or `error`, with status 1.
In between `now` says what is being done, for people who wait.
"""
