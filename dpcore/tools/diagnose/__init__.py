"""Looking at jobs and machines: ``dpcore inspect`` and ``dpcore doctor``."""
