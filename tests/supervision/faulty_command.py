"""Stands in for ``qlora-wgpu``: a process that does what the tests tell it to.

usage: faulty_command.py train STEPS…, one per attempt:
save | vanish | try | come-through | crash | hang | lost | cut | kill | sleep | deaf
"""

import os
import signal
import sys
import time
from pathlib import Path

from qlora_wgpu.errors import LOST
from qlora_wgpu.mapped_files import map_file, map_listeners
from qlora_wgpu.supervision import child
from qlora_wgpu.supervision.child import Journal
from qlora_wgpu.supervision.processes import unblock_signals

journal = Journal.inherited()
child.begin(journal)
unblock_signals()
map_listeners.append(journal.note_mapped)
attempts = Path("attempts")
with attempts.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\n")
number = len(attempts.read_text().splitlines())
plan = [word for word in sys.argv[2:] if ":" in word][number - 1].partition(":")[2]
for step in filter(None, plan.split("+")):
    if step.startswith("save"):
        journal.note_checkpoint(Path(step))
    elif step == "open":
        journal.note_opened()
    elif step == "try":
        journal.note_under_way("checking gemm")
    elif step == "come-through":
        journal.note_under_way("")
    elif step == "crash":
        os.write(2, b"thread 'x' panicked at lib.rs:1\nParent device is lost\nstack backtrace:\n")
        os.abort()
    elif step == "hang":
        child.end_if_hung(lambda: "no response for 1 s")
        time.sleep(600)
    elif step == "lost":
        print("error: the GPU was lost", file=sys.stderr)
        sys.exit(LOST)
    elif step == "cut":
        Path("weights").write_bytes(bytes(1 << 16))
        with Path("weights").open("rb") as file:
            mapped = map_file(Path("weights"), file)
        os.truncate("weights", 100)
        print(mapped[-1])
    elif step == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif step == "mistake":
        sys.exit(2)
    elif step == "vanish":  # as a driver's library calls exit(0)
        os._exit(0)
    elif step == "sleep":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        signal.signal(signal.SIGINT, lambda *_: sys.exit(8))
        Path("ready").write_text(str(os.getpid()))  # last: what it is sent from here on is heard
        time.sleep(600)
    elif step == "deaf":  # as within a call into a driver
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path("ready").write_text(str(os.getpid()))
        time.sleep(600)
journal.note_done()
