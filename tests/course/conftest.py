from pathlib import Path

COURSE = Path(__file__).resolve().parents[2] / "examples" / "course"
