"""How Ridealong's programs are set up, configured, started and supervised."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("ridealong")
except PackageNotFoundError:  # run from a source folder that was never installed
    __version__ = "unknown"
