"""Whether a worker still hears what comes over shared memory (see `kvtransfer.ucx_inbound`, deafness)."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from kvtransfer.ucx import Context, Endpoint, UcxError, Worker
from kvtransfer.ucx_inbound import Intake
from kvtransfer.ucx_wire import HEARING_TAG

# Both ends are on one thread, so this is long even if that seldom gets to run.
_PATIENCE_S: Final = 2.0


class HearingTest:
    """One word from a worker of our own to an ``intake`` that may be deaf. Owned by the kv-io thread."""

    def __init__(self, ucx: Context, intake: Intake) -> None:
        self.intake = intake
        intake.may_be_deaf = intake.hears = False
        self._until = time.monotonic() + _PATIENCE_S
        self._speaker = Worker(ucx)
        self._endpoint: Endpoint | None = None
        self._said = []
        try:
            self._endpoint = Endpoint(self._speaker, intake.worker.address)
            self._said.append(self._endpoint.send(np.zeros(1, np.uint8), HEARING_TAG))
        except UcxError:
            self._until = 0.0

    def is_over(self) -> bool:
        """It was heard, or never will be: `Intake.hears` says which."""
        self._speaker.progress()
        return self.intake.hears or time.monotonic() > self._until

    def end(self) -> None:
        """Once, whatever came out."""
        self._speaker.destroy(self._said)
        if self._endpoint is not None:
            self._endpoint.leak()
