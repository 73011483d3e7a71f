#!/bin/sh
# Airflow's database. Its folder is made once, completely or not at all. Each start sets its password from the secret.
set -eu
if [ ! -d "$PGDATA" ]; then
    rm -rf "$PGDATA.new"
    initdb --username=airflow --pwfile=/run/secrets/postgres_password --auth=scram-sha-256 --encoding=UTF8 \
        --locale=C.UTF-8 "--pgdata=$PGDATA.new" >/dev/null
    echo 'host all all all scram-sha-256' >>"$PGDATA.new/pg_hba.conf"
    echo 'CREATE DATABASE airflow;' | postgres --single -D "$PGDATA.new" postgres >/dev/null
    # This mode does not report a failed statement. But it does report a missing database, so open the database once.
    postgres --single -D "$PGDATA.new" airflow </dev/null >/dev/null
    mv "$PGDATA.new" "$PGDATA"
fi
password=$(sed "s/'/''/g" /run/secrets/postgres_password)
printf "ALTER ROLE airflow PASSWORD '%s';\n" "$password" | postgres --single -D "$PGDATA" postgres >/dev/null
exec postgres -D "$PGDATA" -c 'listen_addresses=*' -c shared_buffers=64MB
