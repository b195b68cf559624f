# The server in a container. Keys first, since it listens to the network; then the server:
#
#   docker build -t precedent .
#   docker run --rm -v precedent-data:/data precedent keys add desk --tenant shop --file /data/keys.json
#   docker run -p 8000:8000 -v precedent-data:/data -v precedent-models:/models -v precedent-cache:/cache \
#     --stop-timeout 45 -e PRECEDENT_SERVE_TARGET=Qwen/Qwen3-4B precedent
#
# For a GPU: --build-arg PIP_ARGS= installs the CUDA build of torch; run it with --gpus all.

FROM python:3.12-slim-bookworm AS build
ARG PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
WORKDIR /build
COPY . .
RUN python -m venv /opt/precedent
RUN /opt/precedent/bin/pip install --no-cache-dir --no-compile --constraint constraints.txt $PIP_ARGS ".[grammar]" \
    ./plugins/precedent-cpu ./plugins/precedent-cuda ./plugins/precedent-drafts ./plugins/precedent-models \
    ./plugins/precedent-postgres ./plugins/precedent-server

FROM python:3.12-slim-bookworm
COPY --from=build /opt/precedent /opt/precedent
RUN useradd --system --uid 10001 --home-dir /data precedent \
    && install --directory --owner precedent --mode 700 /data /models /cache
ENV PATH=/opt/precedent/bin:$PATH \
    HF_HOME=/models \
    XDG_CACHE_HOME=/cache \
    PRECEDENT_SERVE_HOST=0.0.0.0 \
    PRECEDENT_SERVE_API_KEYS=/data/keys.json \
    PRECEDENT_SERVE_CACHE=/data/cache \
    PRECEDENT_HEALTH=http://127.0.0.1:8000/health
VOLUME ["/data", "/models", "/cache"]
USER precedent
WORKDIR /data
EXPOSE 8000
# the port opens once the models are loaded
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen(os.environ['PRECEDENT_HEALTH'], timeout=4)"]
ENTRYPOINT ["precedent"]
CMD ["serve"]
