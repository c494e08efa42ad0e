"""The liveness probe of a pod whose rank torchrun starts and restarts: `python -m seedrl.launching.liveness PORT`.

While torchrun restarts a rank, or waits for the pods of the other ranks, nothing listens at the metrics port. An HTTP
probe would count that as a failure and end the container in the middle of the restart. To this probe a closed port is
fine, because torchrun is there and acts; a rank that answers "not live", or that accepts the connection and does not
answer, is not fine. Knows nothing of manifests.
"""

import http.client
import sys

PATH = "/healthz"
ANSWER_SECONDS = 4.0


def is_live(port: int, answer_seconds: float = ANSWER_SECONDS) -> bool:
    """Return whether the rank on this machine is live or is being restarted."""
    connection = http.client.HTTPConnection("localhost", port, timeout=answer_seconds)
    try:
        connection.request("GET", PATH)
        return connection.getresponse().status == http.HTTPStatus.OK
    except ConnectionRefusedError:
        return True
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_live(int(sys.argv[1])) else "the rank does not answer that it is live")
