# This file makes every image of docker-compose.yml from one base; `docker compose build` makes them all.
# requirements.lock pins the Python packages that run, and local/jars/jars.toml pins the jars. Debian's packages are not
# pinned: they are those of its stable release, with their security updates.

FROM debian:bookworm-slim AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# All containers that share a volume run as this user, so each can read the files of the others.
RUN groupadd --gid 10001 tideline \
    && useradd --uid 10001 --gid 10001 --home-dir /opt/tideline --no-create-home --shell /usr/sbin/nologin tideline


FROM base AS java
# hadolint ignore=DL3008
RUN mkdir -p /usr/share/man/man1 \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/*


FROM java AS python
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*


# The images contain only those files of this stage that later stages copy.
FROM python AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/uv && /opt/uv/bin/pip install --no-cache-dir uv==0.13.8
WORKDIR /opt/tideline
COPY requirements.lock ./
ENV UV_NO_CACHE=1 UV_LINK_MODE=copy \
    TIDELINE_HOME=/var/lib/tideline \
    TIDELINE_JARS=/opt/tideline/jars
RUN /opt/uv/bin/uv venv --quiet --python /usr/bin/python3 .venv \
    && /opt/uv/bin/uv pip sync --quiet --compile-bytecode --python .venv/bin/python --require-hashes requirements.lock
# These files are copied before the rest of the code, which changes more often. So a change of code does not fetch the
# jars again.
COPY jobs/refusal.py ./jobs/
COPY local/steps.py ./local/
COPY local/jars/fetch.py local/jars/jars.toml local/jars/java.py local/jars/lock.py ./local/jars/
# If Maven Central cannot be reached directly, set the address of a mirror, or Java's options for a proxy.
ARG TIDELINE_MAVEN_URL
ARG JAVA_TOOL_OPTIONS
RUN .venv/bin/python -c "import pathlib; from os import environ; from local.jars import fetch; \
    fetch.fetch(pathlib.Path(environ['TIDELINE_JARS']), mirror=environ.get('TIDELINE_MAVEN_URL') or None)"
COPY LICENSE README.md pyproject.toml requirements-dev.lock ./
COPY local ./local
COPY jobs ./jobs
COPY plugins ./plugins
RUN /opt/uv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --build-constraints requirements-dev.lock --editable .
# Check the sums of all jars, and write Spark's classes into one file, which shortens each start of Spark.
RUN .venv/bin/tideline jars
COPY dags ./dags
RUN .venv/bin/python -m compileall -q jobs local plugins dags


FROM java AS kafka
COPY --from=build /opt/tideline/jars/broker /opt/tideline/jars/broker
COPY local/containers/kafka.sh /opt/tideline/
RUN install -d -o tideline -g tideline /var/lib/kafka
USER tideline
ENTRYPOINT ["/bin/sh", "/opt/tideline/kafka.sh"]


# Executors need only the JVM, so this image has no Python and no Airflow.
FROM java AS spark
ENV SPARK_HOME=/opt/spark
COPY --from=build /opt/tideline/.venv/lib/python3.11/site-packages/pyspark/bin/spark-class /opt/spark/bin/
COPY --from=build /opt/tideline/.venv/lib/python3.11/site-packages/pyspark/bin/load-spark-env.sh /opt/spark/bin/
COPY --from=build /opt/tideline/.venv/lib/python3.11/site-packages/pyspark/bin/find-spark-home /opt/spark/bin/
COPY --from=build /opt/tideline/.venv/lib/python3.11/site-packages/pyspark/jars /opt/spark/jars
COPY --from=build /opt/tideline/jars/spark /opt/tideline/jars/spark
COPY jobs/log4j2.properties /opt/tideline/jobs/
RUN install -d -o tideline -g tideline /var/lib/spark /var/lib/tideline/lake
USER tideline
ENTRYPOINT ["/opt/spark/bin/spark-class"]
CMD ["org.apache.spark.deploy.master.Master"]


FROM python AS airflow
COPY --from=build /opt/tideline/.venv /opt/tideline/.venv
COPY --from=build /opt/tideline/jars/spark /opt/tideline/jars/spark
COPY --from=build /opt/tideline/jars/s3 /opt/tideline/jars/s3
# The build may have failed to make the file of Spark's classes (spark.*). The file .lock always exists, so this COPY
# finds at least one file.
COPY --from=build /opt/tideline/jars/.lock /opt/tideline/jars/spark.* /opt/tideline/jars/
COPY --from=build /opt/tideline/local /opt/tideline/local
COPY --from=build /opt/tideline/jobs /opt/tideline/jobs
COPY --from=build /opt/tideline/plugins /opt/tideline/plugins
COPY --from=build /opt/tideline/dags /opt/tideline/dags
RUN install -d -o tideline -g tideline /var/lib/tideline /var/lib/tideline/lake /var/lib/tideline/logs /var/lib/airflow
ENV PATH=/opt/tideline/.venv/bin:$PATH \
    SPARK_HOME=/opt/tideline/.venv/lib/python3.11/site-packages/pyspark \
    SPARK_CONF_DIR=/opt/tideline/spark \
    PYSPARK_PYTHON=/opt/tideline/.venv/bin/python \
    TIDELINE_HOME=/var/lib/tideline \
    TIDELINE_JARS=/opt/tideline/jars \
    LAKE_ROOT=/var/lib/tideline/lake \
    AIRFLOW_HOME=/var/lib/airflow \
    GX_ANALYTICS_ENABLED=false \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/tideline
USER tideline
ENTRYPOINT ["python", "-m", "local.containers.airflow"]
CMD ["scheduler"]


FROM base AS postgres
# The user is created before the package is installed, which would choose any free id. The files in the volume belong to
# this id. The package also generates a key (ssl-cert-snakeoil.key); it is not used, so it is removed.
# hadolint ignore=DL3008
RUN groupadd --gid 10002 postgres \
    && useradd --uid 10002 --gid 10002 --home-dir /var/lib/postgresql --no-create-home --shell /usr/sbin/nologin postgres \
    && apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends postgresql-15 \
    && rm -rf /var/lib/apt/lists/* /var/lib/postgresql/15 /etc/ssl/private/ssl-cert-snakeoil.key \
    && install -d -o postgres -g postgres -m 700 /var/lib/postgresql/data
COPY local/containers/postgres.sh /opt/tideline/
ENV PATH=/usr/lib/postgresql/15/bin:$PATH \
    PGDATA=/var/lib/postgresql/data/main
USER postgres
STOPSIGNAL SIGINT
ENTRYPOINT ["/bin/sh", "/opt/tideline/postgres.sh"]
