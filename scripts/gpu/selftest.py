"""Cases that misbehave, with which the supervisor is tested."""

from __future__ import annotations

import os
import time
from typing import Any

from scripts.gpu.jobs import Case, CheckFailedError
from scripts.gpu.workplace import Workplace


def misbehave(case: Case, place: Workplace) -> dict[str, Any]:
    match case["how"]:
        case "not":
            return {"value": 1}
        case "wrong":
            raise CheckFailedError("off by one")
        case "refuse":
            raise NotImplementedError("head_dim 7; supported: 64")
        case "package":
            raise ModuleNotFoundError("No module named 'flax'", name="flax")
        case "device error":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        case "crash":
            os.abort()
        case "hang":
            time.sleep(1000)
    raise ValueError(case["how"])
