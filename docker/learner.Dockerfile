# The learner's image. In the root of a checkout: docker build -f docker/learner.Dockerfile -t seedrl-learner .
# PyPI's torch for Linux includes CUDA. For machines without a GPU this saves some gigabytes:
#   --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
# Add optional packages with --build-arg EXTRAS=learner,tensorboard.
FROM python:3.11-slim-bookworm AS build
ARG EXTRAS=learner
ARG PIP_EXTRA_INDEX_URL=
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY seedrl seedrl
COPY envs_server envs_server
COPY conf conf
RUN python -m venv /opt/seedrl \
    && /opt/seedrl/bin/pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

FROM python:3.11-slim-bookworm
RUN groupadd --gid 1000 seedrl && useradd --uid 1000 --gid 1000 --no-create-home seedrl
COPY --from=build /opt/seedrl /opt/seedrl
ENV PATH=/opt/seedrl/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["seedrl"]
CMD ["learner", "--help"]
