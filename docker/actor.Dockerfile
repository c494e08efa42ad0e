# The actor's image, without torch. In the root of a checkout: docker build -f docker/actor.Dockerfile -t seedrl-actor .
# env.id=gymnasium:ID needs --build-arg EXTRAS=actor,gymnasium. Add your own environments, or Procgen's Qt, like this:
#   FROM seedrl-actor / USER root / RUN pip install mygame or apt-get install libqt5gui5 / USER 1000:1000
FROM python:3.11-slim-bookworm AS build
ARG EXTRAS=actor
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
CMD ["actor", "--help"]
