# One image for each role, built with --target. A role's image holds its own code, the shared packages and the launcher,
# and of other people's packages only those of its extra: torch is in gpu_worker alone.
#
#   docker build --target tokenizer .
#
# On Linux the package index has torch as a CUDA build of several gigabytes. For a CPU build name a place that has one:
#   docker build --target gpu_worker --build-arg PIP_EXTRA_INDEX_URL=... .
#
# gpu_worker comes last: a builder without BuildKit builds every stage above its target.

FROM python:3.11-slim-bookworm AS base
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PYTHONPATH=/app TOKENWAY_RUN_DIR=/run/tokenway TOKENWAY_MODELS_DIR=/models
# A volume mounted on an empty folder takes its owner; the run directory must be private.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp tokenway \
    && install -d -o tokenway -g tokenway /models \
    && install -d -o tokenway -g tokenway -m 0700 /run/tokenway
# Dependencies come before code, through the distribution's own metadata: a change of code leaves their layers as they are.
COPY pyproject.toml constraints.txt README.md /build/
RUN mkdir /build/services && touch /build/services/__init__.py && pip install -c /build/constraints.txt /build
WORKDIR /app
HEALTHCHECK --interval=5s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-m", "services.runtime.health", "/run/tokenway"]

FROM base AS shared
COPY services/__init__.py services/py.typed services/
COPY services/wire services/wire
COPY services/runtime services/runtime
COPY services/model_files services/model_files
COPY services/launcher services/launcher

FROM base AS weights
RUN pip install -c /build/constraints.txt '/build[download]'
COPY --from=shared /app/services services
USER tokenway
HEALTHCHECK NONE
ENTRYPOINT ["tokenway", "models", "pull"]

FROM base AS scheduler
RUN pip install -c /build/constraints.txt '/build[scheduler]'
COPY --from=shared /app/services services
COPY services/scheduler services/scheduler
USER tokenway
ENTRYPOINT ["tokenway", "serve", "--role", "scheduler"]

FROM base AS detokenizer
RUN pip install -c /build/constraints.txt '/build[detokenizer]'
COPY --from=shared /app/services services
COPY services/detokenizer services/detokenizer
USER tokenway
ENTRYPOINT ["tokenway", "serve", "--role", "detokenizer"]

FROM base AS tokenizer
RUN pip install -c /build/constraints.txt '/build[tokenizer]'
COPY --from=shared /app/services services
COPY services/tokenizer services/tokenizer
USER tokenway
EXPOSE 8000
ENTRYPOINT ["tokenway", "serve", "--role", "tokenizer"]

FROM base AS gpu_worker
RUN pip install -c /build/constraints.txt '/build[gpu-worker]'
COPY --from=shared /app/services services
COPY services/gpu_worker services/gpu_worker
USER tokenway
ENTRYPOINT ["tokenway", "serve", "--role", "gpu_worker"]
