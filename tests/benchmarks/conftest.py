"""`benchmarks` is no installed package: its scripts run from the checkout, and so do its tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
