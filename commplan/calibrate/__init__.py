"""A live job's compute and communication as a profile for the simulator: `commplan profile`."""

from commplan.calibrate.session import Calibrated, Listener, Outcome, Settings, run
from commplan.calibrate.sweep import Limits

__all__ = ["Calibrated", "Limits", "Listener", "Outcome", "Settings", "run"]
