"""What benchmarks measure of a child process."""

import pathlib
import subprocess
import time


def peaks_of(process: subprocess.Popen) -> dict[str, float]:
    """GB that a process had at most until it ended: VmHWM with mapped files, RssAnon without them."""
    peaks = {"VmHWM": 0.0, "RssAnon": 0.0}
    while process.poll() is None:
        try:
            lines = pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        for name, _, value in (line.partition(":") for line in lines):
            if name in peaks:
                peaks[name] = max(peaks[name], int(value.split()[0]) * 1024 / 1e9)
        time.sleep(0.01)
    return peaks
