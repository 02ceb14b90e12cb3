# syntax=docker/dockerfile:1
# A vLLM server that trainers send their weights to. prefrl is installed without what it depends on: vLLM's image has its own torch.
# For CPUs: --build-arg VLLM=vllm/vllm-openai-cpu:v0.32.0
ARG VLLM=vllm/vllm-openai:v0.32.0
FROM ${VLLM}
LABEL org.opencontainers.image.title="prefrl: server" org.opencontainers.image.licenses="Apache-2.0"
COPY pyproject.toml hatch_build.py README.md LICENSE /source/
COPY prefrl /source/prefrl
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir --no-deps /source "annotated-types>=0.7" \
    && useradd --create-home --uid 1001 prefrl
USER 1001
WORKDIR /home/prefrl
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=30s CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["prefrl", "vllm-serve"]
CMD ["--help"]
