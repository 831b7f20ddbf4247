"""A claim on a folder: a file in it with the token of the process that may write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.errors import FileSystemError, LockError
from hpctrain.util.reading import read_json
from hpctrain.util.retry import retries

_MOST = 64 * 1024  # bytes of such a file


@dataclass(frozen=True)
class Claim:
    """The file and its expected token. Processes that write for the claimant check it too."""

    path: str
    token: str

    def check(self) -> None:
        """Raise ``LockError`` if the file is gone or has another token, ``FileSystemError`` if it cannot be read.

        A start of the same run on another node takes the folder over if the scheduler reports that
        this one has ended. The scheduler may be wrong: a node that lost its connection continues to
        compute.
        """
        try:
            found: Any = retries.call(read_json, self.path, _MOST)
        except FileNotFoundError:
            raise LockError(f"{self.path} was deleted while this run held it: it ends and writes no more") from None
        except ValueError:
            found = None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise FileSystemError(f"cannot read {self.path}: {reason}; the owner of the folder is unknown") from error
        if isinstance(found, dict) and found.get("token") == self.token:
            return
        holder = found if isinstance(found, dict) else {}
        job, host = str(holder.get("job_id") or "without id")[:100], str(holder.get("host"))[:100]
        raise LockError(f"{self.path} is now that of job {job!r} on {host!r}: this run ends and writes no more")
