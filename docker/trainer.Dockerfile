# syntax=docker/dockerfile:1
# The trainer: prefrl with the versions of constraints.txt, and PyPI's torch, which brings what it needs of CUDA but the driver.
# For CPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH_INDEX=
ARG EXTRAS=peft,math
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY constraints.txt /source/
RUN python -m venv /opt/prefrl \
    && /opt/prefrl/bin/python -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
        -c /source/constraints.txt torch
COPY pyproject.toml hatch_build.py README.md LICENSE /source/
COPY prefrl /source/prefrl
RUN /opt/prefrl/bin/python -m pip install --no-cache-dir -c /source/constraints.txt "/source[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm
LABEL org.opencontainers.image.title="prefrl: trainer" org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/prefrl /opt/prefrl
# Triton compiles its driver on the machine that it runs on, torch.compile its code for CPUs, and DeepSpeed its own operations.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 prefrl
ENV PATH=/opt/prefrl/bin:$PATH
USER 1000
WORKDIR /home/prefrl
ENTRYPOINT ["prefrl"]
CMD ["--help"]
