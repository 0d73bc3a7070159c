"""The demonstration that `tools/demo` starts: check the library, print a plan, train with it, and show what overlaps.

The parent process (`__main__`, `launch`, `show`, `report`, `page`) imports no torch; the four workers do the rest (`worker`,
`train`, `emulate`, `lockstep`, `measure`, `model`, `data`).
"""
