"""A run in a process of its own: what was planned of host and device, and the most it took.

Usage: python -m support.host_peak RUN.yaml [--resume]
"""

import json
import sys
import threading
import time

from qlora_wgpu import load_config
from qlora_wgpu.gpu.memory import process_bytes
from qlora_wgpu.runs import opening, training
from qlora_wgpu.training import Observer


class Plans(Observer):
    def planned(self, memory):
        self.device = sum(memory.values())

    def planned_on_host(self, memory, mapped):
        self.host, self.mapped = memory, mapped


def main():
    plans, most = Plans(), [0]

    def watch():
        while True:
            most[0] = max(most[0], process_bytes())
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    # A driver is checked once, on a device of its own beside the run's.
    opening.verified_layout = lambda device, opens, launches, layout, observer: layout
    training.train(load_config(sys.argv[1]), plans, resume="--resume" in sys.argv)
    told = {"device": plans.device, "host": plans.host, "mapped": plans.mapped, "peak": most[0]}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
