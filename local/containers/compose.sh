#!/bin/sh
# `docker compose` with this project's secrets. A secret that neither `.env` nor the environment sets is generated once.
# Generated secrets are kept in .tideline/compose.env, which only its owner can read.
set -eu
cd "$(dirname "$0")/../.."
drawn=.tideline/compose.env
word() { od -An -tx1 -N "$1" /dev/urandom | tr -d ' \n'; }
# The value of NAME=value in a file: the last value that is not empty, without quotes or a comment behind it.
setting() {
    sed -n "s/\r\$//; s/^$1=//p" "$2" 2>/dev/null |
        sed -e "s/^'\([^']*\)'.*/\1/" -e t -e 's/^"\([^"]*\)".*/\1/' -e t -e 's/[[:space:]]#.*//' -e 's/[[:space:]]*$//' |
        sed '/^$/d' | tail -n 1
}
draw() {
    [ -n "$(setting "$1" "$drawn")" ] || echo "$1=$2" >>"$drawn"
}
mkdir -p .tideline
(
    umask 077
    draw POSTGRES_PASSWORD "$(word 24)"
    draw AIRFLOW_ADMIN_PASSWORD "$(word 8)"
    draw AIRFLOW_SECRET_KEY "$(word 32)"
    draw AIRFLOW_JWT_SECRET "$(word 32)"
    draw AIRFLOW_FERNET_KEY "$(head -c 32 /dev/urandom | base64 | tr '+/' '-_')"
)
# The value of a setting: from the environment, else from `.env`, else the generated one. An empty value counts as not set.
value() {
    found=$(printenv "$1" || true)
    [ -n "$found" ] || found=$(setting "$1" .env)
    [ -n "$found" ] || found=$(setting "$1" "$drawn")
    printf '%s\n' "$found"
}
if [ "${1:-}" = --report ]; then
    user=$(value AIRFLOW_ADMIN_USER) port=$(value AIRFLOW_PORT) spark=$(value SPARK_UI_PORT)
    echo "Airflow   http://127.0.0.1:${port:-8080}  user ${user:-admin}, password $(value AIRFLOW_ADMIN_PASSWORD)"
    echo "Spark     http://127.0.0.1:${spark:-8081}"
    echo "Query     docker compose exec scheduler tideline query \"select * from rolling_sum limit 5\""
    echo "Stop      make compose-down"
    exit
fi
for secret in $(sed 's/=.*//' "$drawn"); do
    export "$secret=$(value "$secret")"
done
exec docker compose "$@"
