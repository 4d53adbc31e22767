# The one image of Prebook: the operator, and the connector that its init container copies into engine pods.
#
#   docker build -t registry.example/prebook:0.1.0 .
#
# BUILDER needs Python 3.11 with pip; BASE needs Python 3.11 and no more: no shell, no package manager. Every command is in exec form, so neither
# needs a shell. hack/image.sh builds with a base made on the spot where no registry can be reached.
ARG BUILDER=docker.io/library/python:3.11-slim-bookworm
ARG BASE=gcr.io/distroless/python3-debian12:nonroot

FROM ${BUILDER} AS build
ARG PIP_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
WORKDIR /src
COPY hack/image-requirements.txt ./
RUN ["python3", "-m", "pip", "install", "--no-cache-dir", "--root-user-action=ignore", "--require-hashes", "--requirement=image-requirements.txt", "--target=/opt/prebook"]
COPY LICENSE README.md pyproject.toml ./
COPY operator/ operator/
COPY connector/ connector/
COPY bench/ bench/
RUN ["python3", "-m", "pip", "install", "--no-cache-dir", "--root-user-action=ignore", "--no-deps", "--upgrade", "--target=/opt/prebook", "."]

FROM ${BASE}
LABEL org.opencontainers.image.title="prebook" \
      org.opencontainers.image.description="Prebook's operator and vLLM connector" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/prebook /opt/prebook
# The root file system is read-only in a cluster: bytecode was compiled above, and nothing else is written.
ENV PYTHONPATH=/opt/prebook PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 8080 8081
ENTRYPOINT ["python3", "-m", "prebook_operator.cli.main"]
