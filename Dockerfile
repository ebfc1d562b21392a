# dpcore with torch's CPU build, compiled from this clone:
#
#   docker build --build-arg PIP_EXTRA_INDEX_URL=... -t dpcore .    # the index of torch's CPU builds
#   docker run --rm dpcore dpcore doctor
#
# Without the argument pip takes torch from PyPI, with gigabytes of CUDA's libraries.
FROM debian:bookworm-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_EXTRA_INDEX_URL=""
ENV PATH=/opt/dpcore/bin:$PATH PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/dpcore && pip install "torch==2.13.*"
COPY . /src
RUN pip install "/src[plot]"

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 iproute2 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/dpcore /opt/dpcore
ENV PATH=/opt/dpcore/bin:$PATH
WORKDIR /work
CMD ["dpcore", "--help"]
