"""Checks of commplan on the devices of this machine; see `tools/device_check`."""
