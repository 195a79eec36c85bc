"""A clock that is wrong: with this folder on PYTHONPATH, time.time() is off by FAULTS_SKEW_SECONDS."""

import os
import time

_right = time.time
_skew = float(os.environ.get("FAULTS_SKEW_SECONDS", "0"))
time.time = lambda: _right() + _skew
