"""Whether an Airflow component is well, by the API server's word: `python healthy.py scheduler`.

Standard library only: a check every few seconds must not cost what an import of Airflow costs.
"""

import json
import os
import sys
import urllib.request


def main(component: str) -> int:
    """0 if it is healthy."""
    try:
        # A proxy that the host names to its containers knows no service.
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{os.environ['AIRFLOW_API']}/api/v2/monitor/health", timeout=5) as answer:
            state = json.load(answer)[component]["status"]
    except (OSError, ValueError, KeyError) as error:
        print(f"the API server does not say: {error}")
        return 1
    print(state)
    return 0 if state == "healthy" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
