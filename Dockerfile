# One image for every part of Octavo: `docker run octavo worker ...`, `scheduler`, `generate`, ...
#
#   docker build -t octavo .
#   docker build -t octavo:sdk --build-arg EXTRAS= --build-arg TORCH= .
#
# BASE:    Debian-like, with Python 3.11 or newer and its venv module.
# TORCH:   installed first, so that the build that fits is taken; empty for none.
# TORCH_INDEX: index to take it from, for instance that of CPU builds.
# EXTRAS:  of the package, separated by commas.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
ARG EXTRAS=scheduler,worker,gateway
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/octavo
RUN if [ -n "$TORCH" ]; then \
      /opt/octavo/bin/pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$TORCH"; \
    fi
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY client client
COPY scheduler_svc scheduler_svc
COPY worker_svc worker_svc
COPY protos protos
RUN /opt/octavo/bin/pip install -q ".[$EXTRAS]"

FROM ${BASE}
RUN useradd --create-home --uid 10001 octavo \
 && mkdir -p /home/octavo/.cache/octavo \
 && chown -R octavo:octavo /home/octavo/.cache
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1
USER octavo
WORKDIR /home/octavo
# Models that were downloaded.
VOLUME /home/octavo/.cache
EXPOSE 8000 50051 50061 9464 9465
# SIGTERM drains; what is killed after that resumes elsewhere.
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo"]
CMD ["--help"]
