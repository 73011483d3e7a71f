"""Whether an Airflow component is healthy, as the API server reports it: `python healthy.py scheduler`.

It uses the standard library only. It runs every few seconds, and an import of Airflow would cost too much.
"""

import json
import os
import sys
import urllib.request


def main(component: str) -> int:
    """Return 0 if the component is healthy, else 1."""
    try:
        # The host may give its containers a proxy, which cannot reach the services between them.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{os.environ['AIRFLOW_API']}/api/v2/monitor/health", timeout=5) as answer:
            state = json.load(answer)[component]["status"]
    except (OSError, ValueError, KeyError) as error:
        print(f"the API server does not report the health of {component}: {error}")
        return 1
    print(state)
    return 0 if state == "healthy" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
