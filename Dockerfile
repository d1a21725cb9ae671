# The images of Holdfast.
#
#   docker build --target cuda --tag holdfast:cuda .   NVIDIA GPUs, on vLLM's own image
#   docker build --target cpu --tag holdfast:cpu .     no GPU: the demo model, tests, small models
#
# --build-arg REVISION="$(git rev-parse HEAD)" and SOURCE, the address of your repository, go into labels,
# and IMAGE, the name that you give the image, into /statusz.
#
# Both run as uid 10001 with a read-only root file system, if these are writable:
# /tmp, /dev/shm, and below /home/holdfast: .local/state/holdfast, .cache and .cache/huggingface.
#
# The bases are named by tag, so that each build has Debian's latest security fixes; a digest would
# leave them out until someone changes it. What is installed on them has to have its hash. To build
# from what you have examined, pass --build-arg CUDA_BASE=<image>@sha256:<digest>, or CPU_BASE.
ARG CPU_BASE=docker.io/library/python:3.11-slim-bookworm
ARG CUDA_BASE=docker.io/vllm/vllm-openai:v0.32.0

FROM ${CPU_BASE} AS wheel
WORKDIR /source
COPY requirements/cpu.txt requirements/
RUN python3 -m venv /build \
    && grep '^setuptools==' requirements/cpu.txt > /build/requirements.txt \
    && /build/bin/pip install --no-cache-dir --no-deps --require-hashes \
        --requirement /build/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY server server
RUN /build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${CPU_BASE} AS cpu-dependencies
# Where the CPU builds of torch are, if pip does not find them where it looks by default.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
RUN python3 -m venv /opt/holdfast
COPY requirements/cpu.txt requirements/
# The list is complete, and has to be taken without dependencies: it says why.
RUN grep '^torch==' requirements/cpu.txt > requirements/torch.txt \
    && /opt/holdfast/bin/pip install --no-cache-dir --no-deps --no-compile \
        --extra-index-url "${TORCH_INDEX}" --requirement requirements/torch.txt \
    && /opt/holdfast/bin/pip install --no-cache-dir --no-deps --no-compile \
        --only-binary :all: --require-hashes --requirement requirements/cpu.txt \
    && { /opt/holdfast/bin/python -m compileall -qq -j 0 /opt/holdfast/lib || true; }

FROM ${CPU_BASE} AS cpu
# g++: torch compiles kernels for the CPU while a model loads. libnuma1: vLLM links to it. Debian
# keeps only the newest build of a package, so a pinned version would soon not be found.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cpu-dependencies /opt/holdfast /opt/holdfast
ENV PATH=/opt/holdfast/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/home/holdfast \
    USER=holdfast \
    TRITON_CACHE_DIR=/home/holdfast/.cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/home/holdfast/.cache/torchinductor
# A volume that is new takes the owner of what it covers.
RUN useradd --uid 10001 --user-group --create-home --home-dir "${HOME}" holdfast \
    && install --directory --owner holdfast --group holdfast \
        "${HOME}/.cache" "${HOME}/.cache/huggingface" \
        "${HOME}/.local" "${HOME}/.local/state" "${HOME}/.local/state/holdfast"
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir --no-deps /wheels/*.whl \
    && python3 -c "import holdfast.serve"
USER 10001:10001
WORKDIR /home/holdfast
EXPOSE 8000
# The start period is that of a large model; the first success ends it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 \
    CMD ["holdfast", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["holdfast"]
CMD ["serve", "--demo"]
ARG CPU_BASE
ARG SOURCE=""
ARG REVISION=""
ARG IMAGE=""
ENV HOLDFAST_IMAGE="${IMAGE}"
LABEL org.opencontainers.image.title="Holdfast" \
      org.opencontainers.image.description="An OpenAI-compatible server around vLLM whose green light is true." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${CPU_BASE}"

FROM ${CUDA_BASE} AS cuda
USER 0
ENV PYTHONUNBUFFERED=1 \
    HOME=/home/holdfast \
    USER=holdfast \
    TRITON_CACHE_DIR=/home/holdfast/.cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/home/holdfast/.cache/torchinductor \
    CUDA_CACHE_PATH=/home/holdfast/.cache/nvidia \
    TILELANG_CACHE_DIR=/home/holdfast/.cache/tilelang \
    HUMMING_CACHE_DIR=/home/holdfast/.cache/humming \
    HUMMING_TMP_DIR=/home/holdfast/.cache/humming/tmp \
    VLLM_NO_USAGE_STATS=1
RUN useradd --uid 10001 --user-group --create-home --home-dir "${HOME}" holdfast \
    && install --directory --owner holdfast --group holdfast \
        "${HOME}/.cache" "${HOME}/.cache/huggingface" \
        "${HOME}/.local" "${HOME}/.local/state" "${HOME}/.local/state/holdfast"
# What vLLM's image does not have to have, in our pinned versions; the rest is vLLM's own.
# Its Python is the one of the system, which pip may refuse to touch unless told.
COPY requirements/cpu.txt /tmp/requirements/
RUN grep -E '^(orjson|platformdirs|rich|markdown-it-py|mdurl|pygments|cryptography|cffi|pycparser)==' /tmp/requirements/cpu.txt \
        > /tmp/requirements/ours.txt \
    && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-deps \
        --require-hashes --requirement /tmp/requirements/ours.txt \
    && rm -r /tmp/requirements
COPY --from=wheel /wheels /wheels
# What other packages of the base lack is not ours to fix; what we ask for must be there.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-deps /wheels/*.whl \
    && python3 -c "import holdfast.serve" \
    && { python3 -m pip check > /tmp/complaints || ! grep '^holdfast ' /tmp/complaints; } \
    && rm /tmp/complaints
USER 10001:10001
WORKDIR /home/holdfast
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 \
    CMD ["holdfast", "health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["holdfast"]
CMD ["serve", "--help"]
ARG CUDA_BASE
ARG SOURCE=""
ARG REVISION=""
ARG IMAGE=""
ENV HOLDFAST_IMAGE="${IMAGE}"
LABEL org.opencontainers.image.title="Holdfast" \
      org.opencontainers.image.description="An OpenAI-compatible server around vLLM whose green light is true." \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${CUDA_BASE}"
