# `. local/step.sh` defines `step`, which shows the time of a command that takes long. It is plain POSIX sh.
# On a terminal it is one line that is written again each second. In a log there is a line at the begin, every
# LOG_SECONDS, and at the end.

LOG_SECONDS=30

# step WHAT EXPECTED COMMAND...: run the command and return its exit code. Its output is shown only if it fails.
# The command runs in the foreground and the ticker in the background: a background command would ignore Ctrl-C.
step() {
    what=$1 expected=$2 began=$(date +%s) status=0 ticker=
    shift 2
    on_terminal || echo "tideline: $what ($expected)" >&2
    trap 'end_step "stopped after"; trap - INT; kill -INT $$' INT
    tick &
    ticker=$!
    output=$("$@" 2>&1) || status=$?
    trap - INT
    if [ "$status" -eq 0 ]; then
        end_step "done after"
    else
        end_step "failed after"
        [ -z "$output" ] || printf '%s\n' "$output" >&2
    fi
    return "$status"
}

on_terminal() {
    [ -t 2 ] && [ "${TERM:-dumb}" != dumb ]
}

seconds_passed() {
    echo $(($(date +%s) - began))
}

# Counts until `step` ends it. If the script was killed and cannot do that, the ticker ends within a second.
tick() {
    next=$LOG_SECONDS sleeper=
    # In bash, Ctrl-C would end a background function, but not its sleep. `step` ends both.
    trap '' INT
    trap 'end_process "$sleeper"; exit 0' TERM
    while kill -0 $$ 2>/dev/null; do
        seconds=$(seconds_passed)
        if on_terminal; then
            # Without automatic wrapping, the line stays one line on a narrow terminal.
            printf '\r\033[K\033[?7l%s\033[?7h' "tideline: $what: $seconds s ($expected)" >&2
        elif [ "$seconds" -ge "$next" ]; then
            echo "tideline: $what: $seconds s ($expected)" >&2
            next=$((seconds - seconds % LOG_SECONDS + LOG_SECONDS))
        fi
        sleep 1 >/dev/null 2>&1 &
        sleeper=$!
        wait "$sleeper" || true
    done
}

end_step() {
    end_process "$ticker"
    ! on_terminal || printf '\r\033[K' >&2
    echo "tideline: $what: $1 $(seconds_passed) s" >&2
}

end_process() {
    [ -n "$1" ] || return 0
    kill "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}
